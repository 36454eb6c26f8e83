// The precompiled header needs a file that it belongs to: cmake/Precompiled.cmake.
