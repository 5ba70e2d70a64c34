/*
 * The byte ring: one writer, N readers, each of whom gets every record once, in order.
 *
 * A record is written as one fragment if it is short and streamed as several if it is long. Both
 * sides are resumable: they stop at a deadline, a signal or a cancellation and go on where they
 * were. A writer that gives up in mid-record leaves RING_ABORT behind, and readers drop what they
 * have of it. Nothing read from the segment is used before it has been checked against what this
 * process knows.
 */
#ifndef VLLM_COMMEXT_SHM_CORE_H
#define VLLM_COMMEXT_SHM_CORE_H

#include <sys/sysinfo.h>

#include "spill.h"
#include "wait.h"

#define RING_NOBODY (-2)

struct ring_part {
    unsigned char *data;
    uint64_t bytes;
};

/* Where a writer is in its record, or a reader in the one that it is receiving. */
struct ring_progress {
    int active;           /* a fragment of this record has been published, or received */
    uint32_t n_parts;     /* as the user counts them */
    uint64_t total, done; /* bytes of the record, and how many of them have passed */
    uint64_t begun;       /* writer: where its first fragment is */
    uint64_t waited_ns;   /* writer: for room, in all */
    uint32_t part;        /* the next byte belongs to this part ... */
    uint64_t offset;      /* ... at this place */
};

struct ring_end {
    struct ring_segment *segment;
    struct ring_reader *readers;
    unsigned char *data;
    uint64_t map_bytes, capacity;
    uint64_t max_record; /* all memory that there is: the writer has had the record in it */
    uint64_t reserve; /* writer: of the ring's room, for what is spilled */
    uint32_t n_readers, max_fragment;
    int rank;           /* of this reader, or RING_WRITER */
    uint64_t position;  /* of the next byte to write or read */
    uint64_t limit;     /* writer: may write up to here; reader: has been published up to here */
    uint64_t sequence;  /* records completed at this end */
    uint64_t bytes;     /* of these records */
    uint64_t skipped;   /* bytes of `position` that held nothing */
    struct ring_progress at;
    int abort_pending;      /* writer: the record in progress was given up */
    /* the rest of the record in progress is the reader's */
    int fragment_open, has_memory;
    uint32_t fragment_flags;
    uint64_t copy_at, copy_end; /* payload of the open fragment that is still to be copied */
    int fragment_spilled;       /* ... and it is in the file, not in the ring */
    uint64_t fragment_end;      /* where the next fragment starts */
    uint64_t lengths[RING_MAX_PARTS]; /* the record's table */
    struct ring_part parts[RING_MAX_PARTS]; /* where the caller wants the parts */
    int culprit;            /* after RING_PEER_*: which reader, or RING_WRITER */
    const char *why;        /* after RING_CORRUPT, which is final */
    uint64_t looked_ns;     /* writer: when it last looked after all readers ... */
    uint64_t looked_position; /* ... and where it was then */
    int lost_reader;        /* writer: which one it then found dead */
    uint64_t stalled_at, stalled_until; /* writer: the slowest reader's cursor, when it last waited */
    uint64_t wait_started;
    struct ring_spills spills; /* writer */
    struct ring_waiter waiter;
    struct ring_end *next_open; /* of this process's */
};

static inline int ring_corrupt(struct ring_end *end, const char *why) {
    end->why = why;
    return RING_CORRUPT;
}

static inline void ring_identify(struct ring_end *end, struct ring_identity *who) {
    who->pid = (uint32_t)getpid();
    who->locked = ring_lock(end->waiter.fd, end->rank) == 0;
    atomic_store(&who->state, RING_ATTACHED);
}

static inline void ring_copy_in(struct ring_end *end, uint64_t position, const void *from,
                                uint64_t bytes) {
    uint64_t at = position & (end->capacity - 1), first = end->capacity - at;
    if (first > bytes) first = bytes;
    memcpy(end->data + at, from, first);
    memcpy(end->data, (const unsigned char *)from + first, bytes - first);
}

static inline void ring_copy_out(struct ring_end *end, uint64_t position, void *to,
                                 uint64_t bytes) {
    uint64_t at = position & (end->capacity - 1), first = end->capacity - at;
    if (first > bytes) first = bytes;
    memcpy(to, end->data + at, first);
    memcpy((unsigned char *)to + first, end->data, bytes - first);
}

/* ---- creating and attaching ---- */

static inline uint64_t ring_all_memory(void) {
    struct sysinfo info;
    if (sysinfo(&info) < 0) return INT64_MAX;
    return ((uint64_t)info.totalram + info.totalswap) * info.mem_unit;
}

/* `fd`: of the file that is mapped, kept by this end; -1 for memory without one. */
static inline void ring_open(struct ring_end *end, int fd, void *map, uint64_t map_bytes,
                             uint64_t capacity, uint32_t n_readers, int rank) {
    memset(end, 0, sizeof *end);
    end->segment = map;
    end->readers = (struct ring_reader *)(void *)((unsigned char *)map + RING_READERS_AT);
    end->data = (unsigned char *)map + ring_data_offset(n_readers);
    end->map_bytes = map_bytes;
    end->capacity = capacity;
    end->max_record = ring_all_memory();
    end->n_readers = n_readers;
    end->max_fragment = ring_max_fragment(capacity);
    end->rank = rank;
    end->limit = rank == RING_WRITER ? capacity : 0;
    end->culprit = end->lost_reader = RING_NOBODY;
    end->waiter.fd = fd;
    end->waiter.predicts = ring_has_cores_to_predict();
    end->stalled_at = RING_NEVER;
    end->spills.next = end->spills.freed = end->spills.punched = end->spills.high = map_bytes;
}

/* The writer may have so many bytes behind the ring at once. */
static inline void ring_set_budget(struct ring_end *end, uint64_t budget) {
    end->spills.budget = budget;
    end->reserve = budget > 0 ? ring_reserve(end->capacity) : 0;
}

/* The segment is fresh from the kernel, all zero. */
static inline void ring_format(struct ring_end *end, const unsigned char *nonce) {
    struct ring_header *header = &end->segment->header;
    header->version = RING_VERSION;
    header->n_readers = end->n_readers;
    header->capacity = end->capacity;
    header->map_bytes = end->map_bytes;
    memcpy(header->nonce, nonce, RING_NONCE_BYTES);
    ring_identify(end, &end->segment->writer);
    atomic_store_explicit(&header->magic, RING_MAGIC, memory_order_release);
}

/* Take this reader's place. 0 if somebody has it, or has had it, already. */
static inline int ring_claim(struct ring_end *end) {
    struct ring_identity *mine = &end->readers[end->rank].identity;
    struct ring_meeting *meeting = &end->segment->meeting;
    uint32_t expected = RING_FREE;
    if (!atomic_compare_exchange_strong(&mine->state, &expected, RING_CLAIMED)) return 0;
    ring_identify(end, mine);
    atomic_fetch_add(&meeting->attached, 1);
    ring_wake(&meeting->event);
    return 1;
}

/* Say goodbye: whoever waits for this end learns at once that it will not come back. */
static inline void ring_leave(struct ring_end *end) {
    int is_writer = end->rank == RING_WRITER;
    struct ring_identity *mine =
        is_writer ? &end->segment->writer : &end->readers[end->rank].identity;
    atomic_store(&mine->state, RING_CLOSED);
    ring_wake(is_writer ? &end->segment->news : &end->readers[end->rank].cursor.room);
    if (is_writer) ring_wake(&end->segment->meeting.event);
}

#endif
