/* Library for LD_PRELOAD that lets reads and writes of files in CHAOS_DISK_FOLDER fail. The file that CHAOS_DISK names
 * contains the failures to cause, and counts the affected calls. Affects only calls that take an offset in the file,
 * which are those that KV files are read and written with. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

struct page {
    int64_t read_error, write_error; /* errno; 0: none */
    int64_t read_delay_us;
    int64_t cuts_writes; /* 1: each write writes only half of the bytes */
    int64_t torn_pid;    /* pid of the process whose next write stops halfway; 0: none */
    int64_t failed_reads, failed_writes, slow_reads, cut_writes, torn_bytes;
};

typedef ssize_t (*transfer)(int, const struct iovec *, int, off_t, int);

static struct page *page;
static const char *folder;
static transfer real_read, real_write;

__attribute__((constructor)) static void open_page(void) {
    const char *path = getenv("CHAOS_DISK");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    folder = getenv("CHAOS_DISK_FOLDER");
    real_read = (transfer)dlsym(RTLD_NEXT, "preadv2");
    real_write = (transfer)dlsym(RTLD_NEXT, "pwritev2");
    if (fd < 0) return;
    void *mapped = mmap(0, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    page = mapped == MAP_FAILED ? 0 : mapped;
    close(fd);
}

static int64_t get(int64_t *of) { return __atomic_load_n(of, __ATOMIC_SEQ_CST); }
static void count(int64_t *of) { __atomic_add_fetch(of, 1, __ATOMIC_SEQ_CST); }

static int is_there(int fd) {
    char link[40], path[4096];
    if (!page || !folder) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, folder, strlen(folder));
}

static ssize_t write_half(int fd, const struct iovec *given, int of, off_t at, int flags) {
    struct iovec half[1024];
    size_t all = 0;
    for (int n = 0; n < of; n++) all += given[n].iov_len;
    size_t left = (all + 1) / 2;
    int used = 0;
    while (left && used < 1024) {
        half[used] = given[used];
        if (half[used].iov_len > left) half[used].iov_len = left;
        left -= half[used].iov_len;
        used++;
    }
    return real_write(fd, half, used, at, flags);
}

static ssize_t reads(int fd, const struct iovec *into, int of, off_t at, int flags) {
    if (is_there(fd)) {
        int64_t error = get(&page->read_error), delay_us = get(&page->read_delay_us);
        if (delay_us) {
            count(&page->slow_reads);
            for (int64_t waited = 0; waited < delay_us && get(&page->read_delay_us); waited += 10000) usleep(10000);
        }
        if (error) {
            count(&page->failed_reads);
            errno = (int)error;
            return -1;
        }
    }
    return real_read(fd, into, of, at, flags);
}

static ssize_t writes(int fd, const struct iovec *of, int pieces, off_t at, int flags) {
    if (is_there(fd)) {
        int64_t error = get(&page->write_error);
        if (get(&page->torn_pid) == getpid()) {
            ssize_t written = write_half(fd, of, pieces, at, flags);
            __atomic_store_n(&page->torn_bytes, written, __ATOMIC_SEQ_CST);
            while (get(&page->torn_pid) == getpid()) usleep(1000);
            return written;
        }
        if (error) {
            count(&page->failed_writes);
            errno = (int)error;
            return -1;
        }
        if (get(&page->cuts_writes)) {
            count(&page->cut_writes);
            return write_half(fd, of, pieces, at, flags);
        }
    }
    return real_write(fd, of, pieces, at, flags);
}

ssize_t preadv2(int fd, const struct iovec *of, int n, off_t at, int flags) { return reads(fd, of, n, at, flags); }
ssize_t preadv64v2(int fd, const struct iovec *of, int n, off_t at, int flags) { return reads(fd, of, n, at, flags); }
ssize_t preadv(int fd, const struct iovec *of, int n, off_t at) { return reads(fd, of, n, at, 0); }
ssize_t preadv64(int fd, const struct iovec *of, int n, off_t at) { return reads(fd, of, n, at, 0); }
ssize_t pwritev2(int fd, const struct iovec *of, int n, off_t at, int flags) { return writes(fd, of, n, at, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *of, int n, off_t at, int flags) { return writes(fd, of, n, at, flags); }
ssize_t pwritev(int fd, const struct iovec *of, int n, off_t at) { return writes(fd, of, n, at, 0); }
ssize_t pwritev64(int fd, const struct iovec *of, int n, off_t at) { return writes(fd, of, n, at, 0); }
