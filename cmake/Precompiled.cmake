# One precompiled header for everything above the operators. Most of a file's compile time goes into these headers, and
# what is left goes into optimising code that reads files, rewrites graphs and prints tables: -O1 is enough for it, since
# the arithmetic is in ops/ and in PyTorch. Together they halve the build.
#
# ikbo_precompile_headers(TARGET): compiles the target's files with it.
add_library(ikbo_precompiled OBJECT ${CMAKE_CURRENT_LIST_DIR}/precompiled.cc)
target_link_libraries(ikbo_precompiled PRIVATE ikbo_options torch::cpu nlohmann_json::nlohmann_json fmt::fmt)
target_precompile_headers(ikbo_precompiled PRIVATE <ATen/core/Tensor.h> <ATen/core/ivalue.h> <fmt/format.h>
                                                   <fmt/ranges.h> <nlohmann/json.hpp> <algorithm> <map> <set>)

function(ikbo_fast_to_compile target)
  target_compile_options(${target} PRIVATE -O1)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    # -fPIE would make the header, compiled with -fPIC, unusable.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  if(CCACHE)
    # ccache keeps such objects only when told that a precompiled header stands for its text.
    set_target_properties(
      ${target} PROPERTIES CXX_COMPILER_LAUNCHER
                           "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${CCACHE}")
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  endif()
endfunction()
ikbo_fast_to_compile(ikbo_precompiled)

function(ikbo_precompile_headers target)
  ikbo_fast_to_compile(${target})
  target_precompile_headers(${target} REUSE_FROM ikbo_precompiled)
endfunction()
