/*
 * Two ends of a queue on one core while another one is free: who spins keeps the other from
 * running, who sleeps costs two switches a message, and the kernel leaves them there (a virtual
 * machine's halted core counts as taken when a sleeper is woken). So each end says beside its
 * cursor on which core it was, and who is about to wait for a peer on its own core moves itself to
 * another one that it may use, if the wait will be short.
 *
 * Moving is asking not to be here but beside here, where the last cache is the same, and then taking
 * that back. After it the thread's other ends say where it is, too: their peers wait according to
 * that. It is tried again only after a pause that doubles, up to a second, as long as it does not
 * help: all cores may be busy.
 */
#ifndef VLLM_COMMEXT_SHM_CORE_SHARING_H
#define VLLM_COMMEXT_SHM_CORE_SHARING_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layout.h"

#define RING_CORE_UNKNOWN 0u
#define RING_FIRST_PAUSE_NS UINT64_C(500000)
#define RING_LAST_PAUSE_NS UINT64_C(1000000000)
#define RING_WORTH_SPINS 16u /* a move has helped if waits were spun through, so many ... */
#define RING_SPINS_A_SLEEP 4u /* ... and so many for each that was not */

/* What one end keeps about moving. Process-local. */
struct ring_mover {
    uint64_t moved_ns, pause_ns, moves;
    uint32_t spun, slept; /* waits since it moved last */
};

/* Where one open end says on which core its thread is. */
struct ring_place {
    _Atomic uint32_t *core;   /* in shared memory, beside the end's own cursor */
    _Atomic uintptr_t thread; /* that used this end last */
    const struct ring_segment *segment;
    const struct ring_reader *readers;
    uint32_t n_readers;
    struct ring_place *next, **link;
};

static pthread_mutex_t ring_places_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ring_place *ring_places; /* of all open ends of this process */

static inline void ring_add_place(struct ring_place *place) {
    pthread_mutex_lock(&ring_places_lock);
    place->next = ring_places;
    place->link = &ring_places;
    if (ring_places != NULL) ring_places->link = &place->next;
    ring_places = place;
    pthread_mutex_unlock(&ring_places_lock);
}

static inline void ring_remove_place(struct ring_place *place) {
    pthread_mutex_lock(&ring_places_lock);
    *place->link = place->next;
    if (place->next != NULL) place->next->link = place->link;
    pthread_mutex_unlock(&ring_places_lock);
}

/* In a forked child, which owns none of the ends. */
static inline void ring_forget_places(void) {
    pthread_mutex_init(&ring_places_lock, NULL);
    ring_places = NULL;
}

/* The core that this thread runs on, from 1. */
static inline uint32_t ring_core(void) {
    int core = sched_getcpu();
    return core < 0 ? RING_CORE_UNKNOWN : (uint32_t)core + 1;
}

static inline void ring_show_core(struct ring_place *place) {
    atomic_store_explicit(&place->thread, (uintptr_t)pthread_self(), memory_order_relaxed);
    atomic_store_explicit(place->core, ring_core(), memory_order_relaxed);
}

static inline void ring_show_core_everywhere(uint32_t core) {
    uintptr_t self = (uintptr_t)pthread_self();
    pthread_mutex_lock(&ring_places_lock);
    for (struct ring_place *place = ring_places; place != NULL; place = place->next)
        if (atomic_load_explicit(&place->thread, memory_order_relaxed) == self)
            atomic_store_explicit(place->core, core, memory_order_relaxed);
    pthread_mutex_unlock(&ring_places_lock);
}

/* Whether a reader of one of this process's queues was last on this core and has something to read:
 * it may be waiting for the core. A reader that waits has itself nothing to read. */
static inline int ring_core_is_wanted(uint32_t core) {
    int wanted = 0;
    pthread_mutex_lock(&ring_places_lock);
    for (struct ring_place *place = ring_places; place != NULL && !wanted; place = place->next) {
        uint64_t head = atomic_load_explicit(&place->segment->head.position, memory_order_relaxed);
        for (uint32_t rank = 0; rank < place->n_readers && !wanted; rank++) {
            const struct ring_cursor *cursor = &place->readers[rank].cursor;
            wanted = atomic_load_explicit(&cursor->core, memory_order_relaxed) == core &&
                     atomic_load_explicit(&cursor->position, memory_order_relaxed) < head;
        }
    }
    pthread_mutex_unlock(&ring_places_lock);
    return wanted;
}

static inline void ring_count_wait(struct ring_mover *mover, int spun) {
    if (spun)
        mover->spun++;
    else
        mover->slept++;
}

static inline int ring_may_move(struct ring_mover *mover, uint64_t now) {
    if (mover->moved_ns != 0 && now - mover->moved_ns < mover->pause_ns) return 0;
    if (mover->moved_ns == 0 || mover->spun > RING_WORTH_SPINS + RING_SPINS_A_SLEEP * mover->slept)
        mover->pause_ns = RING_FIRST_PAUSE_NS;
    else if (mover->pause_ns < RING_LAST_PAUSE_NS)
        mover->pause_ns *= 2;
    mover->spun = mover->slept = 0;
    mover->moved_ns = now;
    return 1;
}

/* The cores of a list as the kernel writes them, "0-3,8": none for what is no such list. */
static inline void ring_parse_cores(const char *text, cpu_set_t *cores) {
    CPU_ZERO(cores);
    while (*text >= '0' && *text <= '9') {
        char *rest;
        unsigned long first = strtoul(text, &rest, 10), last = first;
        if (*rest == '-') last = strtoul(rest + 1, &rest, 10);
        for (unsigned long core = first; core <= last && core < CPU_SETSIZE; core++)
            CPU_SET(core, cores);
        text = *rest == ',' ? rest + 1 : rest;
    }
}

/* The cores whose last cache is that of `core` (from 0); where the kernel does not tell, those of the
 * same package; else none. */
static inline void ring_read_neighbours(uint32_t core, cpu_set_t *cores) {
    static const char *const places[] = {"cache/index3/shared_cpu_list",
                                         "topology/package_cpus_list"};
    CPU_ZERO(cores);
    for (size_t i = 0; i < sizeof places / sizeof *places && CPU_COUNT(cores) == 0; i++) {
        char path[96], text[1024];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%u/%s", core, places[i]);
        FILE *file = fopen(path, "re");
        if (file == NULL) continue;
        if (fgets(text, sizeof text, file) != NULL) ring_parse_cores(text, cores);
        fclose(file);
    }
}

/* The same, from memory where it can: the kernel's answer takes longer than a message. */
static inline void ring_neighbours(uint32_t core, cpu_set_t *cores) {
    static cpu_set_t known; /* of the core that was asked for last */
    pthread_mutex_lock(&ring_places_lock);
    if (!CPU_ISSET(core, &known)) ring_read_neighbours(core, &known);
    *cores = known;
    pthread_mutex_unlock(&ring_places_lock);
}

/* Leave this core for another one that this thread may run on. 1 if it did. */
static inline int ring_move(struct ring_mover *mover, uint32_t core, uint64_t now) {
    cpu_set_t allowed, others, all, after;
    if (core > CPU_SETSIZE || !ring_may_move(mover, now)) return 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
    ring_neighbours(core - 1, &others);
    CPU_AND(&others, &others, &allowed);
    CPU_CLR(core - 1, &others);
    if (CPU_COUNT(&others) == 0) return 0;
    ring_show_core_everywhere(RING_CORE_UNKNOWN);
    if (sched_setaffinity(0, sizeof others, &others) != 0) return 0;
    mover->moves++;
    /* All cores means no wish of this thread's own: then a later change of its control group's
     * cores reaches it as before. */
    memset(&all, 0xff, sizeof all);
    if (sched_setaffinity(0, sizeof all, &all) != 0 ||
        sched_getaffinity(0, sizeof after, &after) != 0 || !CPU_EQUAL(&after, &allowed))
        (void)sched_setaffinity(0, sizeof allowed, &allowed);
    ring_show_core_everywhere(ring_core());
    return 1;
}

#endif
