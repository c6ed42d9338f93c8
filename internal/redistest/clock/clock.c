// A wall clock of one's own, to be loaded before libc (LD_PRELOAD): ahead of
// the host's by the nanoseconds in the file that REDISTEST_CLOCK names, of
// which a new number counts at once. Other clocks, and timers, are as they are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t second = 1000000000;
static const int64_t zero;
static const volatile int64_t *ahead = &zero;
static int (*host)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("REDISTEST_CLOCK");
	int fd = open(path ? path : "", O_RDONLY | O_CLOEXEC);
	void *p = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
	host = dlsym(RTLD_NEXT, "clock_gettime");
	if (p == MAP_FAILED || !host) {
		perror("REDISTEST_CLOCK");
		_exit(1);
	}
	close(fd);
	ahead = p;
}

int clock_gettime(clockid_t id, struct timespec *ts)
{
	// An allocator may ask before begin has run, and dlsym may allocate.
	int r = host ? host(id, ts) : (int)syscall(SYS_clock_gettime, id, ts);
	if (r == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
		int64_t ns = ts->tv_sec * second + ts->tv_nsec + *ahead;
		ts->tv_sec = ns / second;
		ts->tv_nsec = ns % second;
	}
	return r;
}

int gettimeofday(struct timeval *tv, void *tz)
{
	struct timespec ts;
	int r = clock_gettime(CLOCK_REALTIME, &ts);
	if (r == 0) {
		tv->tv_sec = ts.tv_sec;
		tv->tv_usec = ts.tv_nsec / 1000;
	}
	if (r == 0 && tz)
		*(struct timezone *)tz = (struct timezone){0};
	return r;
}

time_t time(time_t *t)
{
	struct timespec ts;
	time_t now = clock_gettime(CLOCK_REALTIME, &ts) ? -1 : ts.tv_sec;
	if (t)
		*t = now;
	return now;
}
