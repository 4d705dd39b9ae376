// glibc 2.29 added second versions of log and exp, which differ only in how errors are reported, and 2.34 moved
// functions of threads to another library. The first versions let a library built on a new system load on an old one
// (manylinux_2_28).
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.3.4");
#elif defined(__aarch64__) && defined(__GLIBC__)
__asm__(".symver log, log@GLIBC_2.17");
__asm__(".symver exp, exp@GLIBC_2.17");
__asm__(".symver pthread_setaffinity_np, pthread_setaffinity_np@GLIBC_2.17");
#endif
