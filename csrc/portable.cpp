// Kept inside the library, so that it loads with the C++ runtime of systems as old as manylinux_2_28's.
#include <cstdlib>

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
// Vectors and maps call this one, new with GCC 11's runtime, when a size overflows: a bug here, not a bad request.
namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { abort(); }
}  // namespace std
#endif
