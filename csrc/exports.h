// What the functions of the C interface share. No exception leaves one: its caller is C, and the process would end.
#pragma once

#include <exception>
#include <type_traits>

#if defined(_WIN32)
#define PL_EXPORT extern "C" __declspec(dllexport)
#else
#define PL_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace paceline {

// What functions return that can fail; bindings.py knows both names.
using Problem = const char*;  // an error message, or null
template <class T>
using NewObject = T*;  // null if there was no memory or thread for it; native.py raises MemoryError

// The error message of a call that found no memory; native.py raises MemoryError for it.
constexpr const char* kOutOfMemory = "out of memory";

// Runs the body of a function of the C interface, and returns its error message, or null. The only exceptions are those of
// containers and Buffer: std::bad_alloc, and std::length_error for a size beyond all memory.
template <class Body>
Problem guarded(Body body) {
  try {
    if constexpr (std::is_void_v<decltype(body())>) body();
    else return body();
  } catch (const std::exception&) {
    return kOutOfMemory;
  }
  return nullptr;
}

template <class T, class... Arguments>
NewObject<T> made(Arguments&&... arguments) {
  try {
    return new T(arguments...);
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace paceline
