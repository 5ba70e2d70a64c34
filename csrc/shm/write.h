/* The writer's side. See core.h. */
#ifndef VLLM_COMMEXT_SHM_WRITE_H
#define VLLM_COMMEXT_SHM_WRITE_H

#include "core.h"

#define RING_PATIENCE_NS UINT64_C(1000000) /* for a reader that does not move */
#define RING_PATIENCE_BYTES UINT64_C(2)    /* for one that does: a nanosecond more for so many */

/* Look for dead ones among the readers that have not read up to `position`. */
static inline int ring_find_lost_reader(struct ring_end *end, uint64_t position) {
    for (uint32_t rank = 0; rank < end->n_readers; rank++) {
        const struct ring_reader *reader = &end->readers[rank];
        if (atomic_load(&reader->identity.state) == RING_ATTACHED &&
            atomic_load(&reader->cursor.position) < position &&
            ring_is_dead(end->waiter.fd, &reader->identity, (int)rank))
            end->lost_reader = (int)rank;
    }
    return end->lost_reader != RING_NOBODY;
}

/* Whether a reader is known to be dead. Looks twice a second, because a writer that has room need
 * not wait for anybody, and asks the kernel only about those who have not read what was there at the
 * last look: the question takes longer than a message. What it finds after a record has been written
 * ends the next. */
static inline int ring_lost_reader(struct ring_end *end) {
    uint64_t now = ring_now(), seen = end->looked_position;
    if (now - end->looked_ns < RING_LOOK_NS) return end->lost_reader != RING_NOBODY;
    end->looked_ns = now;
    end->looked_position = end->position;
    return ring_find_lost_reader(end, seen);
}

/* Read all readers' cursors. The slowest one's rank goes to *slowest. */
static inline int ring_refresh_limit(struct ring_end *end, uint32_t *slowest) {
    uint64_t least = UINT64_MAX;
    for (uint32_t rank = 0; rank < end->n_readers; rank++) {
        uint64_t tail =
            atomic_load_explicit(&end->readers[rank].cursor.position, memory_order_acquire);
        if (end->position - tail > end->capacity || tail % RING_ALIGN != 0)
            return ring_corrupt(end, "a reader's cursor is outside the ring");
        if (tail < least) {
            least = tail;
            *slowest = rank;
        }
    }
    end->limit = least + end->capacity;
    return RING_OK;
}

/* Until when to wait for a reader whose cursor is at `tail` before the rest is spilled: a moment for
 * each place where it stands still, and for one that moves as long as copying may take. */
static inline uint64_t ring_patience(struct ring_end *end, uint64_t tail, uint64_t now) {
    uint64_t most = RING_PATIENCE_NS + end->at.total / RING_PATIENCE_BYTES;
    if (end->stalled_at != tail) {
        end->stalled_at = tail;
        end->stalled_until = now + RING_PATIENCE_NS;
    }
    uint64_t left = end->at.waited_ns < most ? most - end->at.waited_ns : 0;
    return ring_earlier(end->stalled_until, now + left);
}

static inline int ring_wait_for_room(struct ring_end *end, uint32_t slowest, uint64_t upto,
                                     uint64_t deadline) {
    struct ring_reader *reader = &end->readers[slowest];
    uint64_t target = upto - end->capacity, half = end->position - end->capacity / 2;
    struct ring_wish wish = {
        .cursor = &reader->cursor.position, .event = &reader->cursor.room,
        .target = target, .wanted = &reader->cursor.wanted,
        .lenient = target > half ? target : half, .peer = &reader->identity,
        .peer_rank = (int)slowest, .in_record = end->at.active};
    int status = ring_wait(&end->waiter, &wish, &end->wait_started, deadline);
    if (status != RING_OK) end->culprit = (int)slowest;
    return status;
}

static inline int ring_may_spill_rest(struct ring_end *end, uint64_t now) {
    uint64_t least = end->limit - end->capacity;
    ring_free_spills(&end->spills, end->waiter.fd, least, end->map_bytes);
    return ring_may_spill(&end->spills, end->at.total - end->at.done, now) &&
           end->position + ring_span(sizeof(struct ring_spill)) <= end->limit;
}

/* Room for `bytes` more, with `reserve` beyond. The wait is lenient at first: it lets readers empty
 * half of the ring. RING_SPILLED: it has lasted long enough, and the rest may go behind the ring. */
static inline int ring_need_room(struct ring_end *end, uint64_t bytes, uint64_t reserve,
                                 uint64_t deadline, int may_wait) {
    uint64_t upto = end->position + bytes + reserve;
    while (end->limit < upto) {
        uint32_t slowest = 0;
        int status = ring_refresh_limit(end, &slowest);
        if (status != RING_OK || end->limit >= upto) return status;
        if (!may_wait) return RING_WOULD_BLOCK;
        uint64_t now = ring_now(), until = RING_NEVER;
        if (reserve > 0 && ring_may_spill_rest(end, now)) {
            until = ring_patience(end, end->limit - end->capacity, now);
            if (now >= ring_earlier(until, deadline)) return RING_SPILLED;
        } else if (reserve > 0) {
            until = now + RING_SPILL_AGAIN_NS;
        }
        status = ring_wait_for_room(end, slowest, upto, ring_earlier(until, deadline));
        end->at.waited_ns += ring_now() - now;
        if (status != RING_OK && (status != RING_TIMEOUT || until >= deadline)) return status;
    }
    return RING_OK;
}

static inline void ring_put_fragment(struct ring_end *end, uint32_t bytes, uint32_t flags) {
    struct ring_fragment fragment = {
        .sequence = end->sequence + 1, .record_bytes = end->at.total, .bytes = bytes,
        .n_parts = end->at.n_parts, .flags = flags, .check = ring_check_word(end->position)};
    ring_copy_in(end, end->position, &fragment, sizeof fragment);
}

/* Go on at the beginning of the ring if the fragment would leave the window, the readers have read
 * half of it, and are at this record already if it is longer. Where they lag the rest of the ring
 * takes what they have not read: a long record need not wait for readers that wait for a core. */
static inline int ring_stay_in_window(struct ring_end *end, uint64_t span) {
    uint64_t window = ring_window(end->capacity), offset = end->position & (end->capacity - 1);
    int is_long = end->at.total > window;
    if (offset + span <= window || (is_long && !end->at.active)) return RING_OK;
    uint64_t begin = ring_next_lap(end->position, end->capacity);
    uint64_t upto = begin + (span > window / 2 ? span : window / 2);
    if (is_long && upto <= end->at.begun + end->capacity) upto = end->at.begun + end->capacity + 1;
    if (end->limit < upto + end->reserve) {
        uint32_t slowest;
        int status = ring_refresh_limit(end, &slowest);
        if (status != RING_OK || end->limit < upto + end->reserve) return status;
    }
    ring_put_fragment(end, 0, RING_SKIP);
    end->skipped += begin - end->position;
    atomic_store_explicit(&end->segment->head.skipped, end->skipped, memory_order_relaxed);
    end->position = begin;
    return RING_OK;
}

static inline void ring_publish(struct ring_end *end, uint64_t span) {
    struct ring_segment *segment = end->segment;
    end->position += span;
    ring_advance(&end->waiter, &segment->head.position, end->position, &segment->news, NULL);
}

/* Tell readers to drop what they have of the record that was given up. */
static inline int ring_finish_abort(struct ring_end *end, uint64_t deadline, int may_wait) {
    int status = ring_need_room(end, RING_ALIGN, 0, deadline, may_wait);
    if (status != RING_OK) return status;
    struct ring_progress next = end->at;
    memset(&end->at, 0, sizeof end->at);
    ring_put_fragment(end, 0, RING_ABORT);
    ring_publish(end, RING_ALIGN);
    end->abort_pending = 0;
    end->at = next;
    return RING_OK;
}

static inline void ring_start_record(struct ring_end *end, const struct ring_part *parts,
                                     uint32_t n_spans, uint32_t n_parts) {
    memset(&end->at, 0, sizeof end->at);
    end->at.n_parts = n_parts;
    for (uint32_t i = 0; i < n_spans; i++) end->at.total += parts[i].bytes;
}

static inline void ring_copy_fragment_in(struct ring_end *end, const struct ring_part *parts,
                                         uint32_t bytes) {
    struct ring_progress *at = &end->at;
    uint64_t position = end->position + RING_ALIGN, left = bytes;
    while (left > 0) {
        uint64_t take = parts[at->part].bytes - at->offset;
        if (take > left) take = left;
        if (take > 0) ring_copy_in(end, position, parts[at->part].data + at->offset, take);
        position += take;
        left -= take;
        at->offset += take;
        if (at->offset == parts[at->part].bytes) {
            at->part++;
            at->offset = 0;
        }
    }
    at->done += bytes;
}

static inline void ring_end_fragment(struct ring_end *end, uint32_t bytes, int is_last) {
    if (!end->at.active) end->at.begun = end->position;
    end->at.active = 1;
    if (is_last) {
        end->sequence++;
        end->bytes += end->at.total;
        atomic_store_explicit(&end->segment->head.sequence, end->sequence, memory_order_relaxed);
    }
    ring_publish(end, ring_span(bytes));
}

/* The rest of the record behind the ring. RING_WOULD_BLOCK where there is no memory for it. */
static inline int ring_spill_rest(struct ring_end *end, const struct ring_part *parts) {
    struct ring_progress *at = &end->at;
    struct ring_spills *spills = &end->spills;
    struct ring_spill spill = {.offset = spills->next, .bytes = at->total - at->done};
    uint64_t to = spill.offset, skip = at->offset, left = spill.bytes;
    for (uint32_t part = at->part; left > 0; part++, skip = 0) {
        uint64_t take = parts[part].bytes - skip;
        if (ring_write_file(end->waiter.fd, parts[part].data + skip, take, to) < 0) {
            ring_punch_file(end->waiter.fd, spill.offset, spill.bytes);
            spills->denied_ns = ring_now();
            return RING_WOULD_BLOCK;
        }
        to += take;
        left -= take;
    }
    uint32_t flags = (at->active ? 0 : RING_FIRST) | RING_LAST | RING_SPILL;
    ring_put_fragment(end, sizeof spill, flags);
    ring_copy_in(end, end->position + RING_ALIGN, &spill, sizeof spill);
    at->done = at->total;
    ring_note_spill(spills, end->position + ring_span(sizeof spill), spill.bytes, ring_now());
    ring_end_fragment(end, sizeof spill, 1);
    return RING_OK;
}

/* Give back memory behind the ring that nobody needs any more. */
static inline void ring_tidy(struct ring_end *end) {
    uint32_t slowest = 0;
    if (ring_refresh_limit(end, &slowest) != RING_OK) return;
    ring_free_spills(&end->spills, end->waiter.fd, end->limit - end->capacity, end->map_bytes);
    ring_tidy_spills(&end->spills, end->waiter.fd, end->map_bytes, ring_now());
}

/* One more fragment in the ring, or all the rest behind it. */
static inline int ring_write_fragment(struct ring_end *end, const struct ring_part *parts,
                                      uint64_t deadline, int may_wait) {
    struct ring_progress *at = &end->at;
    uint64_t left = at->total - at->done;
    uint32_t bytes = left > end->max_fragment ? end->max_fragment : (uint32_t)left;
    int status = ring_stay_in_window(end, ring_span(bytes));
    if (status == RING_OK)
        status = ring_need_room(end, ring_span(bytes), end->reserve, deadline, may_wait);
    if (status == RING_SPILLED) {
        if (ring_spill_rest(end, parts) == RING_OK) return RING_OK;
        status = ring_need_room(end, ring_span(bytes), end->reserve, deadline, may_wait);
    }
    if (status != RING_OK) return status;
    ring_put_fragment(end, bytes, (at->active ? 0 : RING_FIRST) | (bytes == left ? RING_LAST : 0));
    ring_copy_fragment_in(end, parts, bytes);
    ring_end_fragment(end, bytes, bytes == left);
    return RING_OK;
}

/* Write what is left of the record that ring_start_record began. With `may_wait` 0 it does what
 * can be done at once and says RING_WOULD_BLOCK. */
static inline int ring_write(struct ring_end *end, const struct ring_part *parts,
                             uint64_t deadline, int may_wait) {
    if (end->why != NULL) return RING_CORRUPT;
    if (atomic_load_explicit(&end->waiter.cancelled, memory_order_relaxed)) return RING_CANCELLED;
    if (end->lost_reader != RING_NOBODY || (may_wait && ring_lost_reader(end))) {
        end->culprit = end->lost_reader;
        return RING_PEER_DEAD;
    }
    if (end->abort_pending) {
        int status = ring_finish_abort(end, deadline, may_wait);
        if (status != RING_OK) return status;
    }
    do {
        int status = ring_write_fragment(end, parts, deadline, may_wait);
        if (status != RING_OK) return status;
    } while (end->at.done < end->at.total);
    end->at.active = 0;
    (void)ring_lost_reader(end);
    if (end->spills.high > end->map_bytes) ring_tidy(end);
    return RING_OK;
}

/* The record in progress will not be finished. */
static inline void ring_give_up(struct ring_end *end) {
    end->wait_started = 0;
    if (!end->at.active) return;
    end->at.active = 0;
    end->abort_pending = 1;
    (void)ring_finish_abort(end, 0, 0); /* if there is no room now, the next record does it */
}

#endif
