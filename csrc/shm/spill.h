/*
 * What does not fit into the ring while a reader is busy: bytes of the segment's file behind the
 * ring, so that a writer need not wait within its budget, and two processes that write to each other
 * never wait for one another.
 *
 * They are written one after the other with pwrite, which takes memory page by page and says when
 * there is no more, and are read with pread: copied once in and once out, mapped by nobody. A
 * fragment in the ring says where they are; when every reader has gone past that fragment they are
 * the writer's again. When all are, it begins again behind the ring, where the pages are there
 * already.
 */
#ifndef VLLM_COMMEXT_SHM_SPILL_H
#define VLLM_COMMEXT_SHM_SPILL_H

#include "file.h"
#include "layout.h"

#define RING_PUNCH_BYTES (UINT64_C(8) << 20)
#define RING_KEEP_SPILLED_NS UINT64_C(10000000000)
#define RING_SPILL_AGAIN_NS UINT64_C(50000000) /* after there was no memory or budget */

/* The writer's books. Process-local. */
struct ring_spills {
    uint64_t budget; /* bytes that may be under way at once; 0: nothing is spilled */
    uint64_t next;   /* where in the file the next one goes */
    uint64_t freed;  /* all before is read */
    uint64_t punched; /* all before has no memory any more */
    uint64_t high;   /* the file's length */
    uint64_t used_ns, denied_ns; /* the last one; when there was no memory for one */
    uint64_t count, first, bytes; /* ever spilled; the oldest under way; bytes ever */
    struct {
        uint64_t position, end; /* of the ring after its fragment; of its bytes in the file */
    } queue[RING_MAX_SPILLS];
};

static inline uint64_t ring_spilled_bytes(const struct ring_spills *spills) {
    return spills->next - spills->freed;
}

/* All readers have read up to `least`. */
static inline void ring_free_spills(struct ring_spills *spills, int fd, uint64_t least,
                                    uint64_t map_bytes) {
    for (; spills->first < spills->count; spills->first++) {
        uint64_t place = spills->first % RING_MAX_SPILLS;
        if (spills->queue[place].position > least) break;
        spills->freed = spills->queue[place].end;
    }
    if (spills->first == spills->count) {
        spills->next = spills->freed = spills->punched = map_bytes;
    } else if (spills->freed - spills->punched > RING_PUNCH_BYTES) {
        ring_punch_file(fd, spills->punched, spills->freed - spills->punched);
        spills->punched = spills->freed;
    }
}

/* Whether so many bytes more are within the budget. A longer record goes alone. */
static inline int ring_may_spill(const struct ring_spills *spills, uint64_t bytes, uint64_t now) {
    uint64_t used = ring_spilled_bytes(spills);
    if (spills->budget == 0 || spills->count - spills->first == RING_MAX_SPILLS) return 0;
    if (spills->denied_ns != 0 && now - spills->denied_ns < RING_SPILL_AGAIN_NS) return 0;
    return used == 0 || (used < spills->budget && bytes <= spills->budget - used);
}

/* The caller has written `bytes` at `next`, and the fragment that says so ends at `position`. */
static inline void ring_note_spill(struct ring_spills *spills, uint64_t position, uint64_t bytes,
                                   uint64_t now) {
    uint64_t place = spills->count++ % RING_MAX_SPILLS;
    spills->next += bytes;
    spills->bytes += bytes;
    spills->queue[place].position = position;
    spills->queue[place].end = spills->next;
    if (spills->next > spills->high) spills->high = spills->next;
    spills->used_ns = now;
}

/* Give back the memory of what was read long ago. */
static inline void ring_tidy_spills(struct ring_spills *spills, int fd, uint64_t map_bytes,
                                    uint64_t now) {
    if (spills->first < spills->count || now - spills->used_ns < RING_KEEP_SPILLED_NS) return;
    if (ftruncate(fd, (off_t)map_bytes) == 0) spills->high = map_bytes;
}

#endif
