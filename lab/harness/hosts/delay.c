// One link with a delay: a TAP device on each side, and every frame passed on so much later.
//
//   delay NETNS DEVICE NETNS DEVICE    (paths of network namespaces). Prints "ready". Each line on its standard input is a
//                                      delay in microseconds, from then on; ends with its standard input.
//
// Frames keep their order, and may be segments of up to 64 KiB that the kernel cuts later (TSO), so that one core carries
// gigabits. A frame for which there is no room is dropped, as a switch does.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { FRAME_BYTES = 1 << 17, ROOM_BYTES = 64 << 20, AT_ONCE = 64 };

struct frame {
    struct frame *next;
    int64_t due_ns;
    ssize_t length;
    char bytes[];
};

struct way {
    int from, to;
    struct frame *first, **end;
    int64_t latest_ns, held_bytes;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static int tap(const char *namespace, const char *name) {
    int inside = open(namespace, O_RDONLY | O_CLOEXEC);
    if (inside < 0 || setns(inside, CLONE_NEWNET) != 0) fail(namespace);
    close(inside);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("/dev/net/tun");
    struct ifreq wanted = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    strncpy(wanted.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, TUNSETIFF, &wanted) != 0) fail(name);
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) != 0) fail("TUNSETOFFLOAD");
    return fd;
}

static void take_in(struct way *way, int64_t delay_ns) {
    static char bytes[FRAME_BYTES];
    for (int count = 0; count < AT_ONCE; count++) {
        ssize_t length = read(way->from, bytes, sizeof bytes);
        if (length <= 0) return;
        if (way->held_bytes + length > ROOM_BYTES) continue;
        struct frame *frame = malloc(sizeof *frame + length);
        if (frame == NULL) continue;
        int64_t due_ns = now_ns() + delay_ns;
        if (due_ns < way->latest_ns) due_ns = way->latest_ns;
        *frame = (struct frame){.due_ns = way->latest_ns = due_ns, .length = length};
        memcpy(frame->bytes, bytes, length);
        way->held_bytes += length;
        *way->end = frame;
        way->end = &frame->next;
    }
}

// When the next one is due, or the latest that there is.
static int64_t pass_on(struct way *way) {
    while (way->first != NULL && way->first->due_ns <= now_ns()) {
        struct frame *frame = way->first;
        if (write(way->to, frame->bytes, frame->length) < 0) { /* the device is down: dropped */ }
        way->held_bytes -= frame->length;
        way->first = frame->next;
        if (way->first == NULL) way->end = &way->first;
        free(frame);
    }
    return way->first == NULL ? INT64_MAX : way->first->due_ns;
}

int main(int count, char **arguments) {
    if (count != 5) return 2;
    int left = tap(arguments[1], arguments[2]), right = tap(arguments[3], arguments[4]);
    struct way ways[2] = {{.from = left, .to = right}, {.from = right, .to = left}};
    for (int way = 0; way < 2; way++) ways[way].end = &ways[way].first;
    int64_t delay_ns = 0;
    struct pollfd watched[3] = {{left, POLLIN, 0}, {right, POLLIN, 0}, {0, POLLIN, 0}};
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int64_t due_ns = pass_on(&ways[0]), other_ns = pass_on(&ways[1]);
        if (other_ns < due_ns) due_ns = other_ns;
        int64_t left_ns = due_ns == INT64_MAX ? 1000000000LL : due_ns - now_ns();
        if (left_ns < 0) left_ns = 0;
        struct timespec wait = {left_ns / 1000000000LL, left_ns % 1000000000LL};
        if (ppoll(watched, 3, &wait, NULL) < 0 && errno != EINTR) fail("ppoll");
        for (int way = 0; way < 2; way++)
            if (watched[way].revents & POLLIN) take_in(&ways[way], delay_ns);
        if (watched[2].revents) {
            char line[32] = {0};
            if (read(0, line, sizeof line - 1) <= 0) return 0;
            delay_ns = atoll(line) * 1000;
        }
    }
}
