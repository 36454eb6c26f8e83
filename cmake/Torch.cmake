# Imported targets for the PyTorch wheel's own libraries.
#
# find_package(Torch) of a CUDA build demands a CUDA toolkit. The CPU build must work without one, so the wheel's
# libraries are linked directly: torch::cpu (c10 + libtorch_cpu) and, where a program wants the CUDA backend loaded,
# torch::cuda. Headers come from the same wheel.
find_package(Python3 3.9 COMPONENTS Interpreter REQUIRED)
if(NOT IKBO_TORCH_DIR)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
    OUTPUT_VARIABLE IKBO_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing)
  if(torch_missing)
    message(FATAL_ERROR "PyTorch was not found by ${Python3_EXECUTABLE}: run scripts/setup.sh, or pass "
                        "-DPython3_EXECUTABLE=<python with torch> or -DIKBO_TORCH_DIR=<.../site-packages/torch>")
  endif()
endif()
file(READ ${IKBO_TORCH_DIR}/version.py torch_version_py)
string(REGEX MATCH "__version__ = '([0-9]+\\.[0-9]+)" torch_version_match "${torch_version_py}")
if(NOT CMAKE_MATCH_1 STREQUAL "2.11")
  message(FATAL_ERROR "ikbo is built against PyTorch 2.11, but ${IKBO_TORCH_DIR} holds ${CMAKE_MATCH_1}")
endif()

add_library(torch_headers INTERFACE)
target_include_directories(torch_headers SYSTEM INTERFACE ${IKBO_TORCH_DIR}/include
                                                          ${IKBO_TORCH_DIR}/include/torch/csrc/api/include)
set(IKBO_TORCH_LIBRARIES c10 torch_cpu)
if(IKBO_CUDA)
  list(APPEND IKBO_TORCH_LIBRARIES c10_cuda torch_cuda)
endif()
foreach(lib ${IKBO_TORCH_LIBRARIES})
  add_library(torch::${lib} SHARED IMPORTED)
  set_target_properties(torch::${lib} PROPERTIES IMPORTED_LOCATION ${IKBO_TORCH_DIR}/lib/lib${lib}.so)
endforeach()
add_library(torch_cpu_all INTERFACE)
target_link_libraries(torch_cpu_all INTERFACE torch_headers torch::torch_cpu torch::c10)
# Debian's linker checks that shared libraries' own needs can be found; the wheel finds its CUDA libraries by RPATH.
target_link_options(torch_cpu_all INTERFACE -Wl,--allow-shlib-undefined)
add_library(torch::cpu ALIAS torch_cpu_all)
if(IKBO_CUDA)
  # The CUDA backend registers itself when it is loaded: keep the dependency although few of its symbols are used.
  add_library(torch_cuda_all INTERFACE)
  target_link_libraries(torch_cuda_all INTERFACE torch_cpu_all -Wl,--no-as-needed torch::torch_cuda torch::c10_cuda
                                                 -Wl,--as-needed)
  add_library(torch::cuda ALIAS torch_cuda_all)
endif()

# at::parallel_for is a template in a header: compiled without OpenMP it runs everything on one thread, silently. The
# wheel's own OpenMP library is linked, so that there is one pool of threads.
file(GLOB torch_gomp ${IKBO_TORCH_DIR}/lib/libgomp*.so*)
if(NOT torch_gomp)
  message(FATAL_ERROR "no libgomp in ${IKBO_TORCH_DIR}/lib: ikbo is built against PyTorch's own wheels")
endif()
list(GET torch_gomp 0 torch_gomp)
add_library(torch_openmp INTERFACE)
target_compile_options(torch_openmp INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_libraries(torch_openmp INTERFACE ${torch_gomp})
add_library(torch::openmp ALIAS torch_openmp)
