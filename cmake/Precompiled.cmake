# Precompiled headers: most of a file's compile time goes into PyTorch's headers and those of the JSON library.
#
# ikbo_precompile_headers(TARGET): for what reads files, rewrites graphs and prints tables: one header that all share, and
#   -O1, which is enough since the arithmetic is in ops/ and in PyTorch. ikbo_precompile_headers(TARGET HEADER...) makes a
#   header of its own with the given ones on top.
# ikbo_cache_precompiled(TARGET): lets ccache keep objects made with a precompiled header.
function(ikbo_cache_precompiled target)
  if(CCACHE)
    # ccache keeps such objects only when told that a precompiled header stands for its text.
    set_target_properties(
      ${target} PROPERTIES CXX_COMPILER_LAUNCHER
                           "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${CCACHE}")
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  endif()
endfunction()

function(ikbo_fast_to_compile target)
  target_compile_options(${target} PRIVATE -O1)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    # -fPIE would make the header, compiled with -fPIC, unusable.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  ikbo_cache_precompiled(${target})
endfunction()

set(IKBO_COMMON_HEADERS <ATen/core/Tensor.h> <ATen/core/ivalue.h> <fmt/format.h> <fmt/ranges.h> <nlohmann/json.hpp>
                        <algorithm> <map> <set>)
add_library(ikbo_precompiled OBJECT ${CMAKE_CURRENT_LIST_DIR}/precompiled.cc)
target_link_libraries(ikbo_precompiled PRIVATE ikbo_options torch::cpu nlohmann_json::nlohmann_json fmt::fmt)
target_precompile_headers(ikbo_precompiled PRIVATE ${IKBO_COMMON_HEADERS})
ikbo_fast_to_compile(ikbo_precompiled)

function(ikbo_precompile_headers target)
  ikbo_fast_to_compile(${target})
  if(ARGN)
    target_precompile_headers(${target} PRIVATE ${IKBO_COMMON_HEADERS} ${ARGN})
  else()
    target_precompile_headers(${target} REUSE_FROM ikbo_precompiled)
  endif()
endfunction()
