/* Preloaded into a server to shift its wall clock. The file named by CLOCK_OFFSET holds the offset
   in seconds, as eight bytes. Writing to the file makes the clock step. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long long *offset(void) {
  static volatile long long none, *found;
  if (!found) {
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    found = mapped == MAP_FAILED ? &none : mapped;
  }
  return found;
}

int gettimeofday(struct timeval *when, void *zone) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int result = real(when, zone);
  when->tv_sec += *offset();
  return result;
}

int clock_gettime(clockid_t clock, struct timespec *when) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, when);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) when->tv_sec += *offset();
  return result;
}
