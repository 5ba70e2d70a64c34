/*
 * Two ends of a queue, or two readers of one, on one core: who spins there keeps the other from
 * running. So each end says beside its cursor on which core it was when it last advanced, and nobody
 * spins on a core that a peer needs.
 */
#ifndef VLLM_COMMEXT_SHM_CORE_SHARING_H
#define VLLM_COMMEXT_SHM_CORE_SHARING_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#include "layout.h"

#define RING_CORE_UNKNOWN 0u

/* Where one open end says on which core it is, and the readers of its queue. */
struct ring_place {
    _Atomic uint32_t *core; /* in shared memory, beside the end's own cursor */
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

static inline void ring_show_core(const struct ring_place *place) {
    atomic_store_explicit(place->core, ring_core(), memory_order_relaxed);
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

#endif
