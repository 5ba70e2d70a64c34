/*
 * The shared segment of a byte ring with one writer and N readers: what lies where.
 *
 *   0                 header          written once at creation, then only read
 *   RING_LINE         writer identity
 *   2 * RING_LINE     writer cursor   head (bytes published), sequence (records completed)
 *   3 * RING_LINE     news            what readers sleep on
 *   4 * RING_LINE     meeting         readers attached, "everyone is here", what both sleep on
 *   RING_READERS_AT   per reader: cursor line, identity line
 *   (page aligned)    data            `capacity` bytes, a power of two
 *   map_bytes         spilled data    read and written by the file's descriptor, not mapped
 *
 * Positions are 64-bit byte counts that never wrap in practice; the place in the ring is
 * position & (capacity - 1). While readers keep up the writer skips all but the first quarter (the
 * window), whose memory is then in the caches whenever it is used again. Every line has one process
 * that writes it while data flows, and sits alone on 128 bytes: two cache lines, because x86
 * prefetches neighbours and some Arm cores have lines of 128.
 */
#ifndef VLLM_COMMEXT_SHM_LAYOUT_H
#define VLLM_COMMEXT_SHM_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "64-bit atomics must be lock-free across processes");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "32-bit atomics must be lock-free across processes");

#define RING_MAGIC UINT64_C(0x31474e5258434356) /* "VCCXRNG1" */
#define RING_VERSION 5u
#define RING_LINE 128u
#define RING_READERS_AT (8u * RING_LINE)
#define RING_PAGE 4096u
#define RING_ALIGN 32u /* fragments start here, so that their headers never wrap */
#define RING_NONCE_BYTES 16u
#define RING_MIN_CAPACITY 4096u
#define RING_MAX_CAPACITY (UINT64_C(1) << 30)
#define RING_MAX_READERS 4096u
#define RING_MAX_PARTS 1024u
#define RING_MAX_FRAGMENT (256u << 10)
#define RING_MAX_SPILLS 1024u /* under way at once */
#define RING_IMMUTABLE (UINT64_C(1) << 63) /* in the table: this part was, and becomes, `bytes` */

enum ring_state { RING_FREE = 0, RING_CLAIMED = 1, RING_ATTACHED = 2, RING_CLOSED = 3 };

struct ring_header {
    _Atomic uint64_t magic; /* stored last, so that a half-made segment is refused */
    uint32_t version;
    uint32_t n_readers;
    uint64_t capacity;
    uint64_t map_bytes;
    unsigned char nonce[RING_NONCE_BYTES];
};

/* Who holds an end. It lives as long as its byte of the file is locked: see file.h. */
struct ring_identity {
    _Atomic uint32_t state;
    uint32_t pid;    /* in its own pid namespace, for messages */
    uint32_t locked; /* the kernel has given it the lock */
};

/* A word to sleep on. Bit 0: somebody sleeps, or is about to. Every wake-up changes the rest. */
typedef _Atomic uint32_t ring_event;

/* A cursor that its owner advances and others wait for. */
struct ring_cursor {
    _Atomic uint64_t position;
    _Atomic uint64_t sequence;
    _Atomic uint64_t wanted;     /* readers: where the writer wants to be woken */
    _Atomic uint64_t high_water; /* readers: the most bytes ever found waiting */
    ring_event room;             /* readers: what the writer sleeps on */
    _Atomic uint64_t skipped;    /* writer: how much of its position holds nothing */
};

struct ring_reader {
    _Alignas(RING_LINE) struct ring_cursor cursor;
    _Alignas(RING_LINE) struct ring_identity identity;
};

struct ring_meeting {
    _Atomic uint64_t attached;
    _Atomic uint64_t ready;
    ring_event event;
};

struct ring_segment {
    _Alignas(RING_LINE) struct ring_header header;
    _Alignas(RING_LINE) struct ring_identity writer;
    _Alignas(RING_LINE) struct ring_cursor head;
    _Alignas(RING_LINE) ring_event news;
    _Alignas(RING_LINE) struct ring_meeting meeting;
};

_Static_assert(sizeof(struct ring_reader) == 2 * RING_LINE, "two lines a reader");
_Static_assert(sizeof(struct ring_segment) <= RING_READERS_AT, "fixed lines overlap the readers");

/* RING_SKIP: nothing follows up to the end of the ring; the next fragment is at its beginning.
 * RING_SPILL: a struct ring_spill says where the rest of the record is. */
enum ring_flags { RING_FIRST = 1, RING_LAST = 2, RING_ABORT = 4, RING_SKIP = 8, RING_SPILL = 16 };

/* In front of every fragment of a record. A record is one fragment unless it is long: then it is
 * streamed, so that it may exceed the ring and readers copy while the writer still writes. */
struct ring_fragment {
    uint64_t sequence;     /* of the record, from 1 */
    uint64_t record_bytes; /* table of part lengths (if any) and parts, over all fragments */
    uint32_t bytes;        /* payload of this fragment, without padding */
    uint32_t n_parts;
    uint32_t flags;
    uint32_t check; /* of the position, so that a torn or foreign header is noticed */
};

_Static_assert(sizeof(struct ring_fragment) == RING_ALIGN, "headers must not wrap");

/* Bytes of the file behind the ring. */
struct ring_spill {
    uint64_t offset, bytes;
};

static inline uint64_t ring_round_up(uint64_t bytes, uint64_t to) {
    return (bytes + to - 1) / to * to;
}

static inline uint64_t ring_data_offset(uint32_t n_readers) {
    return ring_round_up(RING_READERS_AT + (uint64_t)n_readers * sizeof(struct ring_reader),
                         RING_PAGE);
}

static inline uint64_t ring_segment_bytes(uint64_t capacity, uint32_t n_readers) {
    return ring_data_offset(n_readers) + capacity;
}

/* Room that a fragment of `bytes` takes, header and padding included. */
static inline uint64_t ring_span(uint64_t bytes) {
    return RING_ALIGN + ring_round_up(bytes, RING_ALIGN);
}

/* Room that is kept for the places of what is spilled, so that a full ring can still refer to it. */
static inline uint64_t ring_reserve(uint64_t capacity) {
    uint64_t most = RING_MAX_SPILLS * ring_span(sizeof(struct ring_spill));
    return most < capacity / 4 ? most : capacity / 4;
}

/* How much of the ring is used while readers keep up: a quarter. */
static inline uint64_t ring_window(uint64_t capacity) { return capacity / 4; }

/* Where the ring begins again after `position`. */
static inline uint64_t ring_next_lap(uint64_t position, uint64_t capacity) {
    return (position | (capacity - 1)) + 1;
}

/* None is longer than the window: the writer fills a quarter while readers empty the others. */
static inline uint32_t ring_max_fragment(uint64_t capacity) {
    uint64_t most = ring_window(capacity) - RING_ALIGN;
    return (uint32_t)(most < RING_MAX_FRAGMENT ? most : RING_MAX_FRAGMENT);
}

/* The table of part lengths lies in the first fragment. */
static inline uint32_t ring_max_parts(uint64_t capacity) {
    uint32_t fitting = ring_max_fragment(capacity) / (uint32_t)sizeof(uint64_t);
    return fitting < RING_MAX_PARTS ? fitting : RING_MAX_PARTS;
}

static inline uint32_t ring_check_word(uint64_t position) {
    return (uint32_t)((position / RING_ALIGN) * UINT64_C(2654435761)) ^ 0x52494e47u;
}

/* NULL if a ring of this shape can exist, else what is wrong with it. */
static inline const char *ring_bad_shape(uint64_t capacity, uint32_t n_readers,
                                         uint64_t map_bytes) {
    if (capacity < RING_MIN_CAPACITY || capacity > RING_MAX_CAPACITY)
        return "the capacity must be from 4 KiB to 1 GiB";
    if (capacity & (capacity - 1)) return "the capacity must be a power of two";
    if (n_readers < 1 || n_readers > RING_MAX_READERS) return "there must be 1 to 4096 readers";
    if (map_bytes < ring_segment_bytes(capacity, n_readers))
        return "the segment is shorter than its ring";
    return NULL;
}

/* NULL if the segment is the ring that its address describes, else the difference. */
static inline const char *ring_bad_header(const struct ring_header *header, uint64_t capacity,
                                          uint32_t n_readers, uint64_t map_bytes,
                                          const unsigned char *nonce) {
    if (atomic_load_explicit(&header->magic, memory_order_acquire) != RING_MAGIC)
        return "it does not start with the ring's magic number";
    if (header->version != RING_VERSION) return "it has another layout version";
    if (header->capacity != capacity) return "its capacity differs from the address's";
    if (header->n_readers != n_readers) return "its number of readers differs from the address's";
    if (header->map_bytes != map_bytes) return "its length differs from the address's";
    if (memcmp(header->nonce, nonce, RING_NONCE_BYTES) != 0)
        return "it belongs to another queue (its nonce differs from the address's)";
    return NULL;
}

#endif
