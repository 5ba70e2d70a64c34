/*
 * What the machine itself takes for a round trip between two processes: over a cache line that both
 * spin on, over a futex on which each sleeps, and over the cache line with 100 KiB that are copied
 * into shared memory and out of it, both ways.
 *
 * usage: floors <core of one> <core of the other>, -1 for any; prints the medians in microseconds.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST_ROUNDS 20000u
#define LONGEST_US 2e6
#define END UINT32_MAX
#define COPIED (100u << 10)

struct line {
    _Alignas(128) _Atomic uint32_t value;
};

/* One for each direction. */
struct shared {
    struct line lines[2];
    unsigned char data[2][COPIED];
};

static void use_core(int core) {
    cpu_set_t set;
    if (core < 0) return;
    CPU_ZERO(&set);
    CPU_SET((unsigned)core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void tell(struct line *line, uint32_t value, int sleeps) {
    atomic_store(&line->value, value);
    if (sleeps) syscall(SYS_futex, &line->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Wait until the line holds something else than before; return it. */
static uint32_t await(struct line *line, uint32_t before, int sleeps) {
    uint32_t seen;
    for (uint32_t turn = 0; (seen = atomic_load(&line->value)) == before; turn++) {
        if (sleeps)
            syscall(SYS_futex, &line->value, FUTEX_WAIT, seen, NULL, NULL, 0);
        else if (turn % 10000 == 9999)
            sched_yield(); /* both may be on one core */
    }
    return seen;
}

static int ascending(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double median_us(struct shared *shared, int sleeps, size_t bytes, int mine, int others) {
    static double found[MOST_ROUNDS];
    static unsigned char own[COPIED];
    struct line *lines = shared->lines;
    lines[0].value = lines[1].value = 0;
    pid_t child = fork();
    if (child == 0) {
        use_core(others);
        uint32_t seen = 0;
        while ((seen = await(&lines[0], seen, sleeps)) != END) {
            memcpy(own, shared->data[0], bytes);
            memcpy(shared->data[1], own, bytes);
            tell(&lines[1], seen, sleeps);
        }
        _exit(0);
    }
    use_core(mine);
    uint32_t rounds = 0;
    double begin = now_us(), started = begin;
    while (rounds < MOST_ROUNDS && started < begin + LONGEST_US) {
        memcpy(shared->data[0], own, bytes);
        tell(&lines[0], rounds + 1, sleeps);
        await(&lines[1], rounds, sleeps);
        memcpy(own, shared->data[1], bytes);
        double ended = now_us();
        found[rounds++] = ended - started;
        started = ended;
    }
    tell(&lines[0], END, sleeps);
    waitpid(child, NULL, 0);
    qsort(found, rounds, sizeof *found, ascending);
    return found[rounds / 2];
}

int main(int argc, char **argv) {
    int mine = argc > 2 ? atoi(argv[1]) : -1, others = argc > 2 ? atoi(argv[2]) : -1;
    void *memory = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    printf("%.3f", median_us(memory, 0, 0, mine, others));
    printf(" %.3f", median_us(memory, 1, 0, mine, others));
    printf(" %.3f\n", median_us(memory, 0, COPIED, mine, others));
    return 0;
}
