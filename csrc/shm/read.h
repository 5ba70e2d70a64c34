/* A reader's side. See core.h. */
#ifndef VLLM_COMMEXT_SHM_READ_H
#define VLLM_COMMEXT_SHM_READ_H

#include "core.h"

/* How much there is to read, for whoever observes the queue. */
static inline void ring_note_waiting(struct ring_end *end, uint64_t waiting) {
    _Atomic uint64_t *high = &end->readers[end->rank].cursor.high_water;
    uint64_t skipped = atomic_load_explicit(&end->segment->head.skipped, memory_order_relaxed);
    uint64_t empty = skipped - end->skipped;
    waiting -= empty < waiting ? empty : waiting;
    if (waiting > atomic_load_explicit(high, memory_order_relaxed))
        atomic_store_explicit(high, waiting, memory_order_relaxed);
}

static inline int ring_need_data(struct ring_end *end, uint64_t deadline, int may_wait) {
    struct ring_segment *segment = end->segment;
    while (end->limit == end->position) {
        uint64_t head = atomic_load_explicit(&segment->head.position, memory_order_acquire);
        uint64_t waiting = head - end->position;
        if (waiting > end->capacity || head % RING_ALIGN != 0)
            return ring_corrupt(end, "the writer's cursor is outside the ring");
        end->limit = head;
        if (waiting > 0) {
            ring_note_waiting(end, waiting);
            return RING_OK;
        }
        if (!may_wait) return RING_WOULD_BLOCK;
        struct ring_wish wish = {
            .cursor = &segment->head.position, .event = &segment->news,
            .target = end->position + 1, .peer = &segment->writer, .peer_rank = RING_WRITER,
            .in_record = end->at.active};
        int status = ring_wait(&end->waiter, &wish, &end->wait_started, deadline);
        if (status != RING_OK) {
            end->culprit = RING_WRITER;
            return status;
        }
    }
    return RING_OK;
}

/* Check a fragment against the reader's place in the stream. NULL if all is well. */
static inline const char *ring_bad_fragment(const struct ring_end *end,
                                            const struct ring_fragment *fragment) {
    if (fragment->check != ring_check_word(end->position)) return "a record's header is damaged";
    if (fragment->sequence != end->sequence + 1) return "a record is out of sequence";
    if (fragment->bytes > end->capacity ||
        ring_span(fragment->bytes) > end->limit - end->position)
        return "a record reaches beyond what was published";
    if (fragment->flags == RING_ABORT || fragment->flags == RING_SKIP) return NULL;
    if (((fragment->flags & RING_FIRST) != 0) == (end->at.active != 0))
        return "a record begins or goes on in the wrong place";
    if (!end->at.active) {
        if (fragment->record_bytes > end->max_record) return "a record is impossibly long";
        if (fragment->n_parts < 1 || fragment->n_parts > RING_MAX_PARTS)
            return "a record has an impossible number of parts";
        return NULL;
    }
    if (fragment->record_bytes != end->at.total || fragment->n_parts != end->at.n_parts)
        return "a record changed while it was streamed";
    return NULL;
}

static inline void ring_release_fragment(struct ring_end *end) {
    struct ring_cursor *cursor = &end->readers[end->rank].cursor;
    end->position = end->fragment_end;
    ring_advance(&end->waiter, &cursor->position, end->position, &cursor->room, &cursor->wanted);
}

/* The next bytes of the open fragment, wherever they are. */
static inline int ring_take(struct ring_end *end, void *to, uint64_t bytes) {
    if (!end->fragment_spilled)
        ring_copy_out(end, end->copy_at, to, bytes);
    else if (ring_read_file(end->waiter.fd, to, bytes, end->copy_at) < 0)
        return ring_corrupt(end, "what was written behind the ring cannot be read");
    end->copy_at += bytes;
    return RING_OK;
}

/* Where a fragment's payload is, and how much. */
static inline const char *ring_find_payload(struct ring_end *end,
                                            const struct ring_fragment *fragment) {
    end->copy_at = end->position + RING_ALIGN;
    end->copy_end = end->copy_at + fragment->bytes;
    end->fragment_spilled = (fragment->flags & RING_SPILL) != 0;
    if (!end->fragment_spilled) return NULL;
    struct ring_spill spill;
    if (fragment->bytes != sizeof spill) return "a record's place behind the ring is damaged";
    ring_copy_out(end, end->copy_at, &spill, sizeof spill);
    if (spill.offset < end->map_bytes || spill.bytes > end->max_record ||
        !ring_file_holds(end->waiter.fd, spill.offset, spill.bytes))
        return "a record's place behind the ring is damaged";
    end->copy_at = spill.offset;
    end->copy_end = spill.offset + spill.bytes;
    return NULL;
}

/* The lengths of the parts into end->lengths: from the table, or the record itself. */
static inline const char *ring_read_table(struct ring_end *end) {
    struct ring_progress *at = &end->at;
    uint64_t table = at->n_parts * sizeof(uint64_t);
    if (at->n_parts == 1) {
        end->lengths[0] = at->total | RING_IMMUTABLE;
        return NULL;
    }
    if (table > end->copy_end - end->copy_at) return "a record's table is cut short";
    int status = ring_take(end, end->lengths, table);
    if (status != RING_OK) return end->why;
    at->done = table;
    uint64_t left = at->total - table;
    for (uint32_t i = 0; i < at->n_parts; i++) {
        uint64_t length = end->lengths[i] & ~RING_IMMUTABLE;
        if (length > left) return "a record's parts are longer than the record";
        left -= length;
    }
    return left == 0 ? NULL : "a record's parts are shorter than the record";
}

/* The writer gave this record up: so does the reader. The caller keeps the memory it lent. */
static inline void ring_drop_record(struct ring_end *end) {
    memset(&end->at, 0, sizeof end->at);
    end->has_memory = 0;
    ring_release_fragment(end);
}

/* The writer went on at the beginning of the ring. It says so together with what it wrote there. */
static inline int ring_follow_skip(struct ring_end *end) {
    uint64_t begin = ring_next_lap(end->position, end->capacity);
    if (begin >= end->limit) return ring_corrupt(end, "the ring begins again before it is written");
    end->skipped += begin - end->position;
    end->position = begin;
    return RING_OK;
}

static inline int ring_open_fragment(struct ring_end *end) {
    struct ring_fragment fragment;
    struct ring_progress *at = &end->at;
    ring_copy_out(end, end->position, &fragment, sizeof fragment);
    const char *why = ring_bad_fragment(end, &fragment);
    if (why != NULL) return ring_corrupt(end, why);
    if (fragment.flags == RING_SKIP) return ring_follow_skip(end);
    end->fragment_end = end->position + ring_span(fragment.bytes);
    if (fragment.flags == RING_ABORT) {
        ring_drop_record(end);
        return RING_OK;
    }
    why = ring_find_payload(end, &fragment);
    if (why != NULL) return ring_corrupt(end, why);
    /* `at` is all zero before the first fragment */
    uint64_t upto = at->done + (end->copy_end - end->copy_at);
    int is_last = (fragment.flags & RING_LAST) != 0;
    if (upto > fragment.record_bytes || is_last != (upto == fragment.record_bytes))
        return ring_corrupt(end, "a record's fragments do not add up");
    end->fragment_flags = fragment.flags;
    end->fragment_open = 1;
    if (at->active) return RING_OK;
    at->active = 1;
    at->n_parts = fragment.n_parts;
    at->total = fragment.record_bytes;
    why = ring_read_table(end);
    return why == NULL ? RING_OK : ring_corrupt(end, why);
}

static inline int ring_copy_fragment_out(struct ring_end *end) {
    struct ring_progress *at = &end->at;
    at->done += end->copy_end - end->copy_at;
    while (end->copy_at < end->copy_end) {
        struct ring_part *part = &end->parts[at->part];
        uint64_t take = part->bytes - at->offset, left = end->copy_end - end->copy_at;
        if (take > left) take = left;
        if (take > 0 && ring_take(end, part->data + at->offset, take) != RING_OK)
            return RING_CORRUPT;
        at->offset += take;
        if (at->offset == part->bytes) {
            at->part++;
            at->offset = 0;
        }
    }
    return RING_OK;
}

static inline void ring_finish_fragment(struct ring_end *end) {
    struct ring_reader *mine = &end->readers[end->rank];
    end->fragment_open = 0;
    if (end->fragment_flags & RING_LAST) {
        end->sequence++;
        end->bytes += end->at.total;
        atomic_store_explicit(&mine->cursor.sequence, end->sequence, memory_order_relaxed);
        memset(&end->at, 0, sizeof end->at);
        end->has_memory = 0;
    }
    ring_release_fragment(end);
}

/* Receive one record. RING_NEED_MEMORY: at->n_parts and lengths are known; set parts and
 * has_memory and call again. RING_OK: the parts are complete. Any other status: call again to go on
 * where it was. Data that is there is delivered whatever has happened to this end or the writer. */
static inline int ring_read(struct ring_end *end, uint64_t deadline, int may_wait) {
    if (end->why != NULL) return RING_CORRUPT;
    for (;;) {
        if (!end->fragment_open) {
            int status = ring_need_data(end, deadline, may_wait);
            if (status == RING_OK) status = ring_open_fragment(end);
            if (status != RING_OK) return status;
            if (!end->fragment_open) continue;
        }
        if (!end->has_memory) return RING_NEED_MEMORY;
        if (ring_copy_fragment_out(end) != RING_OK) return RING_CORRUPT;
        uint32_t is_last = end->fragment_flags & RING_LAST;
        ring_finish_fragment(end);
        if (is_last) return RING_OK;
    }
}

#endif
