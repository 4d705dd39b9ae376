// A kernel with any NUMA nodes: preloaded, it notes what the kernels bind in the file NODES_FILE and lets it succeed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>

long syscall(long number, ...) {
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  const int prefers = number == SYS_mbind && a[3];  // a node: OpenBLAS, which numpy loads, calls it without
  if (!prefers) return ((long (*)(long, ...))dlsym(RTLD_NEXT, "syscall"))(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  FILE* file = fopen(getenv("NODES_FILE"), "a");
  fprintf(file, "%ld %ld %d\n", a[0], a[1], __builtin_ctzl(*(unsigned long*)a[3]));
  fclose(file);
  return 0;
}
