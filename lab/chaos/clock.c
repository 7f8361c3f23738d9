/* Library for LD_PRELOAD that shifts the wall clock of a process. The file that CHAOS_CLOCK names contains the offset of
 * CLOCK_REALTIME in seconds, and the number of clock reads with an offset. Monotonic clocks are not shifted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct page { int64_t offset_s; int64_t told; };

static struct page *page;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_page(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (fd < 0) return;
    void *mapped = mmap(0, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    page = mapped == MAP_FAILED ? 0 : mapped;
    close(fd);
}

static int64_t jump(void) {
    int64_t offset_s = page ? __atomic_load_n(&page->offset_s, __ATOMIC_RELAXED) : 0;
    if (offset_s) __atomic_add_fetch(&page->told, 1, __ATOMIC_RELAXED);
    return offset_s;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_clock_gettime(clock, out);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    if (!result && out) *out = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
