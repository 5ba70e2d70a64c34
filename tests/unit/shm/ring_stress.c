/*
 * The C core without Python, for the sanitizers and for other processors: one writer and three
 * readers over one file in memory, as threads or as processes. Records of random sizes, some longer
 * than the ring, some behind it, some given up half-way; every reader checks that it gets each
 * finished record once, in order and whole. Of processes one reader is killed at the end, and the
 * writer has to find out which.
 *
 * usage: ring_stress <records> [processes]; prints "ok" and exits with 0.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "read.h"
#include "write.h"

#define READERS 3u
#define CAPACITY 8192u
#define LONGEST 30000u
#define BUDGET 100000u

static uint64_t map_bytes;
static uint64_t n_records, *n_written; /* the latter in memory that processes share */
static _Atomic int finished;

static void fail(const char *what) {
    fprintf(stderr, "failed: %s\n", what);
    exit(1);
}

static uint32_t random_number(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* A record is its number, then bytes that follow from the number and the place. */
static void fill(unsigned char *data, uint64_t bytes, uint64_t number) {
    memcpy(data, &number, sizeof number);
    for (uint64_t i = sizeof number; i < bytes; i++) data[i] = (unsigned char)(number * 31 + i);
}

static void *write_all(void *argument) {
    struct ring_end *end = argument;
    unsigned char data[LONGEST];
    uint32_t seed = 1;
    for (uint64_t i = 0; i < n_records; i++) {
        uint32_t kind = random_number(&seed) % 16;
        uint64_t bytes = sizeof(uint64_t) + random_number(&seed) % (kind <= 1 ? LONGEST - 8 : 300);
        struct ring_part part = {.data = data, .bytes = bytes};
        uint64_t deadline = kind <= 1 ? ring_now() + 2000 : RING_NEVER;
        ring_set_budget(end, kind % 2 ? BUDGET : 0); /* without one, given up half-way as well */
        fill(data, bytes, *n_written);
        ring_start_record(end, &part, 1, 1);
        end->wait_started = 0;
        int status;
        do status = ring_write(end, &part, deadline, 1);
        while (status == RING_INTERRUPTED);
        if (status == RING_OK)
            ++*n_written;
        else if (status == RING_TIMEOUT)
            ring_give_up(end);
        else
            fail("write");
    }
    unsigned char nothing = 0;
    struct ring_part last = {.data = &nothing, .bytes = 0};
    int status = RING_INTERRUPTED;
    ring_start_record(end, &last, 1, 1);
    while (status == RING_INTERRUPTED) status = ring_write(end, &last, RING_NEVER, 1);
    return NULL;
}

static void *read_all(void *argument) {
    struct ring_end *end = argument;
    unsigned char data[LONGEST], expected[LONGEST];
    for (uint64_t number = 0;; number++) {
        int status;
        while ((status = ring_read(end, RING_NEVER, 1)) != RING_OK) {
            if (status == RING_NEED_MEMORY) {
                end->parts[0].data = data;
                end->parts[0].bytes = end->lengths[0] & ~RING_IMMUTABLE;
                if (end->parts[0].bytes > LONGEST) fail("length");
                end->has_memory = 1;
            } else if (status != RING_INTERRUPTED) {
                fail(end->why != NULL ? end->why : "read");
            }
        }
        uint64_t bytes = end->parts[0].bytes;
        if (bytes == 0) {
            if (number != *n_written) fail("count");
            return NULL;
        }
        fill(expected, bytes, number);
        if (memcmp(data, expected, bytes) != 0) fail("content");
    }
}

/* Cancels a wait that nothing else would end. */
static void *wait_for_ever(void *argument) {
    struct ring_end *end = argument;
    int status;
    do status = ring_read(end, RING_NEVER, 1);
    while (status == RING_INTERRUPTED);
    if (status != RING_CANCELLED) fail("cancel");
    atomic_store(&finished, 1);
    return NULL;
}

/* An end with an open file description of its own, and the mapping that all share: a sanitizer knows
 * memory by its address. */
static void open_end(struct ring_end *end, int file, void *map, int rank) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) fail("open");
    ring_open(end, fd, map, map_bytes, CAPACITY, READERS, rank);
}

static void attach(struct ring_end *end, int file, void *map, int rank) {
    open_end(end, file, map, rank);
    if (!ring_claim(end) || ring_claim(end)) fail("claim");
}

static void run_threads(struct ring_end *writer, int file, void *map) {
    static struct ring_end readers[READERS];
    pthread_t threads[READERS + 1];
    for (uint32_t i = 0; i < READERS; i++) {
        attach(&readers[i], file, map, (int)i);
        pthread_create(&threads[i], NULL, read_all, &readers[i]);
    }
    pthread_create(&threads[READERS], NULL, write_all, writer);
    for (uint32_t i = 0; i <= READERS; i++) pthread_join(threads[i], NULL);
    pthread_create(&threads[0], NULL, wait_for_ever, &readers[0]);
    ring_cancel(&readers[0].waiter);
    pthread_join(threads[0], NULL);
    if (!atomic_load(&finished)) fail("the cancelled reader did not end");
    ring_leave(writer);
    if (ring_read(&readers[1], RING_NEVER, 1) != RING_PEER_CLOSED) fail("closed writer");
    for (uint32_t i = 0; i < READERS; i++) close(readers[i].waiter.fd);
}

/* The last reader stays when it has read all, until it is killed. */
static void read_in_a_process(int file, void *map, int rank) {
    static struct ring_end reader;
    attach(&reader, file, map, rank);
    read_all(&reader);
    while (rank == READERS - 1) pause();
    _exit(0);
}

static void run_processes(struct ring_end *writer, int file, void *map) {
    struct ring_meeting *meeting = &writer->segment->meeting;
    pid_t children[READERS];
    int status;
    for (uint32_t i = 0; i < READERS; i++) {
        children[i] = fork();
        if (children[i] < 0) fail("fork");
        if (children[i] == 0) {
            close(writer->waiter.fd); /* else it would keep the writer's lock */
            read_in_a_process(file, map, (int)i);
        }
    }
    while (atomic_load(&meeting->attached) < READERS) usleep(1000);
    write_all(writer);
    for (uint32_t i = 0; i < READERS - 1; i++)
        if (waitpid(children[i], &status, 0) < 0 || status != 0) fail("a reader's process");
    const struct ring_identity *last = &writer->readers[READERS - 1].identity;
    if (ring_is_dead(writer->waiter.fd, last, READERS - 1)) fail("a living reader is taken for dead");
    kill(children[READERS - 1], SIGKILL);
    waitpid(children[READERS - 1], &status, 0);
    if (!WIFSIGNALED(status)) fail("the last reader has ended by itself");
    if (!ring_is_dead(writer->waiter.fd, last, READERS - 1)) fail("a killed reader is not found dead");
}

int main(int argc, char **argv) {
    static struct ring_end writer;
    unsigned char nonce[RING_NONCE_BYTES] = {7};
    n_records = argc > 1 ? strtoull(argv[1], NULL, 10) : 10000;
    map_bytes = ring_segment_bytes(CAPACITY, READERS);
    n_written = mmap(NULL, sizeof *n_written, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int file = memfd_create("ring", MFD_CLOEXEC);
    if (n_written == MAP_FAILED || ftruncate(file, (off_t)map_bytes) < 0) fail("memory");
    void *map = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) fail("mmap");
    open_end(&writer, file, map, RING_WRITER);
    ring_format(&writer, nonce);
    if (ring_bad_header(&writer.segment->header, CAPACITY, READERS, map_bytes, nonce) != NULL)
        fail("header");
    if (argc > 2)
        run_processes(&writer, file, map);
    else
        run_threads(&writer, file, map);
    if (n_records > 1000 && writer.spills.bytes == 0) fail("nothing went behind the ring");
    close(writer.waiter.fd);
    munmap(map, map_bytes);
    munmap(n_written, sizeof *n_written);
    close(file);
    puts("ok");
    return 0;
}
