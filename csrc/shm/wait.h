/*
 * Waiting for a cursor in shared memory: a bounded, adaptive spin, then a futex, then another
 * bounded spin where the end of the wait is foreseen.
 *
 * No wake-up can be lost. Who waits sets the event's bit, keeps the word as its ticket, and then
 * reads the cursor; who advances stores the cursor and then reads the event; all are sequentially
 * consistent, so at least one of the two sees the other. A wake-up clears the bit by changing the
 * word, so that it wakes all who hold the old ticket: the kernel compares ticket and word before it
 * puts anyone to sleep. The slices in which a sleeper wakes by itself serve liveness and signals,
 * not correctness.
 */
#ifndef VLLM_COMMEXT_SHM_WAIT_H
#define VLLM_COMMEXT_SHM_WAIT_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "file.h"
#include "guess.h"
#include "layout.h"

#define RING_NEVER UINT64_MAX
#define RING_SLEEPER 1u /* of a ring_event */
#define RING_NS_PER_S UINT64_C(1000000000)
#define RING_LENIENT_NS UINT64_C(1000000)
#define RING_SLICE_NS RING_NS_PER_S
#define RING_LOOK_NS (RING_NS_PER_S / 2)
#define RING_CORES_TO_PREDICT 4 /* with fewer, somebody else has use for what is spun away */

enum ring_status {
    RING_OK = 0,
    RING_TIMEOUT = 1,
    RING_CANCELLED = 2,
    RING_PEER_DEAD = 3,
    RING_PEER_CLOSED = 4,
    RING_CORRUPT = 5,
    RING_INTERRUPTED = 6, /* a signal came: let the interpreter handle it, then go on */
    RING_WOULD_BLOCK = 7,
    RING_NEED_MEMORY = 8, /* a record has begun: say where its parts shall go, then go on */
    RING_SPILLED = 9,     /* inside of a write: the rest went behind the ring */
};

/* What one end counts and keeps about waiting. Process-local, never in the segment. */
struct ring_waiter {
    _Atomic(ring_event *) waiting_on; /* non-NULL exactly while inside a wait */
    _Atomic uint32_t cancelled;
    int fd; /* of the segment's file, -1 if there is none */
    struct ring_guess guess;
    int predicts; /* there are processors enough to spin for what a GPU's step brings */
    uint64_t checked_ns; /* when the peer was last known to live */
    uint64_t waits, sleeps, wake_ups, foreseen;
};

/* One wait: until *cursor >= target, asleep on *event. */
struct ring_wish {
    _Atomic uint64_t *cursor;
    ring_event *event;
    uint64_t target;
    _Atomic uint64_t *wanted; /* where to say from which position on to be woken; NULL: any news */
    uint64_t lenient;         /* what to say in the first millisecond, >= target: fewer switches */
    const struct ring_identity *peer; /* who has to advance it; NULL: nobody in particular */
    int peer_rank;
    int in_record;                    /* the peer is busy with a record's rest */
};

static inline uint64_t ring_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * RING_NS_PER_S + (uint64_t)now.tv_nsec;
}

static inline void ring_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* `yield` is a no-op on most Arm servers */
#endif
}

static inline int ring_sleep(ring_event *event, uint32_t ticket, uint64_t timeout_ns) {
    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / RING_NS_PER_S),
                               .tv_nsec = (long)(timeout_ns % RING_NS_PER_S)};
    long result = syscall(SYS_futex, event, FUTEX_WAIT, ticket, &timeout, NULL, 0);
    return result == 0 ? 0 : errno;
}

static inline void ring_wake(ring_event *event) {
    uint32_t seen = atomic_load(event);
    while (!atomic_compare_exchange_weak(event, &seen, (seen | RING_SLEEPER) + 1)) continue;
    syscall(SYS_futex, event, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* `look` allows to ask the kernel, once a second. */
static inline int ring_peer_status(struct ring_waiter *waiter, const struct ring_wish *wish,
                                   uint64_t now, int look) {
    if (wish->peer == NULL) return RING_OK;
    uint32_t state = atomic_load(&wish->peer->state);
    if (state == RING_CLOSED) return RING_PEER_CLOSED;
    if (!look || state != RING_ATTACHED || now - waiter->checked_ns < RING_SLICE_NS) return RING_OK;
    waiter->checked_ns = now;
    return ring_is_dead(waiter->fd, wish->peer, wish->peer_rank) ? RING_PEER_DEAD : RING_OK;
}

/* Move an own cursor and wake who waits for it: one system call however many sleep, else none. */
static inline void ring_advance(struct ring_waiter *waiter, _Atomic uint64_t *cursor,
                                uint64_t value, ring_event *event, _Atomic uint64_t *wanted) {
    atomic_store(cursor, value);
    if (!(atomic_load(event) & RING_SLEEPER)) return;
    if (wanted != NULL && value < atomic_load(wanted)) return;
    ring_wake(event);
    waiter->wake_ups++;
}

static inline uint64_t ring_earlier(uint64_t one, uint64_t other) {
    return one < other ? one : other;
}

static inline int ring_reached(const struct ring_wish *wish) {
    return atomic_load(wish->cursor) >= wish->target;
}

/* 1 once reached, 0 at `until`. It never yields: with other work on this core a yield costs a
 * scheduler's tick, where a sleeper is woken at once. */
static inline int ring_spin(const struct ring_wish *wish, uint64_t until) {
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(wish->cursor, memory_order_acquire) >= wish->target) return 1;
            ring_pause();
        }
    } while (ring_now() < until);
    return 0;
}

/* How long to sleep at most: until the deadline, or the end of a slice. */
static inline uint64_t ring_slice(const struct ring_wish *wish, uint64_t start, uint64_t now,
                                  uint64_t deadline) {
    int lenient = wish->lenient > wish->target && now - start < RING_LENIENT_NS;
    return ring_earlier(deadline - now, lenient ? RING_LENIENT_NS : RING_SLICE_NS);
}

/* Sleep until the wish is fulfilled or something else has to be looked at. */
static inline int ring_park(struct ring_waiter *waiter, const struct ring_wish *wish,
                            uint64_t start, uint64_t deadline) {
    for (;;) {
        uint64_t now = ring_now();
        int lenient = now - start < RING_LENIENT_NS;
        if (wish->wanted != NULL) atomic_store(wish->wanted, lenient ? wish->lenient : wish->target);
        uint32_t ticket = atomic_fetch_or(wish->event, RING_SLEEPER) | RING_SLEEPER;
        if (ring_reached(wish)) return RING_OK;
        if (atomic_load(&waiter->cancelled)) return RING_CANCELLED;
        int look = now >= deadline || now - start >= RING_SLICE_NS; /* short waits go first */
        int peer = ring_peer_status(waiter, wish, now, look);
        if (peer != RING_OK) return ring_reached(wish) ? RING_OK : peer;
        if (now >= deadline) return RING_TIMEOUT;
        waiter->sleeps++;
        int error = ring_sleep(wish->event, ticket, ring_slice(wish, start, now, deadline));
        if (ring_reached(wish)) return RING_OK;
        if (error == EINTR) return RING_INTERRUPTED;
        if (error == ETIMEDOUT && ring_now() - start >= RING_LENIENT_NS * 2) return RING_INTERRUPTED;
    }
}

/* How long to spin for a wish. For room hardly: the reader runs faster unwatched, and has made much
 * room when it wakes a sleeper. */
static inline struct ring_bet ring_place_bet(struct ring_waiter *waiter,
                                             const struct ring_wish *wish, uint64_t now) {
    struct ring_guess *guess = &waiter->guess;
    uint32_t kind = wish->in_record ? RING_IN_RECORD : guess->history;
    struct ring_bet bet = {&guess->habits[kind], now, RING_SPIN_MIN_NS};
    if (wish->lenient > wish->target && !wish->in_record) return bet;
    return ring_bet_on(guess, kind, now);
}

/* Sleep until shortly before the wait is expected to end, spin while it is, then sleep on. A wait
 * that goes on after RING_INTERRUPTED comes here again, at whatever point it has reached. */
static inline int ring_sleep_and_spin(struct ring_waiter *waiter, const struct ring_wish *wish,
                                      const struct ring_habit *habit, uint64_t start,
                                      uint64_t deadline) {
    struct ring_window window = {0, 0};
    if (waiter->predicts && wish->peer != NULL && !wish->in_record)
        window = ring_predict(habit);
    uint64_t from = start + window.from, until = ring_earlier(start + window.until, deadline);
    if (window.until != 0 && from < deadline && ring_now() < until) {
        int status = ring_now() < from ? ring_park(waiter, wish, start, from) : RING_TIMEOUT;
        if (status != RING_TIMEOUT) return status;
        if (ring_spin(wish, until)) {
            waiter->foreseen++;
            return RING_OK;
        }
    }
    return ring_park(waiter, wish, start, deadline);
}

/* Whether this process may use so many processors that a little spinning costs nobody anything. */
static inline int ring_has_cores_to_predict(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
           CPU_COUNT(&allowed) >= RING_CORES_TO_PREDICT;
}

/* Wait until the wish is fulfilled. Call without the interpreter's lock. `*started`: 0 for a new
 * wait, kept by the caller while it goes on after RING_INTERRUPTED. That is also returned once a
 * slice, because a signal may have arrived just before the sleep began. */
static inline int ring_wait(struct ring_waiter *waiter, const struct ring_wish *wish,
                            uint64_t *started, uint64_t deadline) {
    if (ring_reached(wish)) return RING_OK;
    struct ring_bet bet = {&waiter->guess.habits[waiter->guess.history], *started, 0};
    int status = RING_OK, spun = 0;
    atomic_store(&waiter->waiting_on, wish->event);
    if (*started == 0) {
        *started = ring_now();
        waiter->waits++;
        bet = ring_place_bet(waiter, wish, *started);
        spun = ring_spin(wish, ring_earlier(*started + bet.budget, deadline));
    }
    if (!spun) status = ring_sleep_and_spin(waiter, wish, bet.habit, *started, deadline);
    atomic_store(&waiter->waiting_on, NULL);
    if (status != RING_OK) return status;
    ring_learn(&waiter->guess, &bet, ring_now(), spun);
    *started = 0;
    return RING_OK;
}

/* End the present wait and every later one, from any thread. Who begins to wait on something else
 * meanwhile sees `cancelled` before it sleeps. */
static inline void ring_cancel(struct ring_waiter *waiter) {
    atomic_store(&waiter->cancelled, 1);
    ring_event *event = atomic_load(&waiter->waiting_on);
    if (event != NULL) ring_wake(event);
}

#endif
