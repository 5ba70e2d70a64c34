/*
 * How long a wait is worth spinning for: a guess from how the waits before it went.
 *
 * Waits between records are told apart by which of the last three were short, so that a pattern
 * (two messages a step, then a pause) is learned like a branch by a processor. A wait that is
 * expected to be long is not spun for, so that a reader of rare messages costs nothing. Long waits
 * that are about equally long, as those for a GPU's step are, are slept through until shortly before
 * their end and spun for from then on: a sleeper wakes up to some hundred microseconds late where
 * processors halt. Process-local arithmetic: no clock, no shared memory.
 */
#ifndef VLLM_COMMEXT_SHM_GUESS_H
#define VLLM_COMMEXT_SHM_GUESS_H

#include <stdint.h>

#define RING_SPIN_MIN_NS UINT64_C(1500)
#define RING_SPIN_MAX_NS UINT64_C(500000)
#define RING_SPIN_SLACK_NS UINT64_C(20000)
#define RING_MOST_FAILED 7u
#define RING_LONGEST_PREDICTED_NS UINT64_C(100000000)
#define RING_LATE_NS UINT64_C(150000) /* how late a sleeper may wake */
#define RING_MOST_SPREADS 3u /* about what a tenth of waits differ by, and more */
#define RING_SHARE_SPUN 6u /* of a predicted wait one part in so many may be spun for, on average */
#define RING_ENOUGH_LONG 4u /* waits of about the same length, before the next is predicted ... */
#define RING_MOST_LONG 8u   /* ... and so many at most are remembered, ... */
#define RING_MISS_LONG 2u   /* ... of which one behind its window takes so many away */
#define RING_HISTORIES 8u /* of the last three waits: which of them were short */

/* How waits of one kind went: `score` of 2 or 3 expects the next to be short, about usual_ns. */
struct ring_habit {
    uint64_t usual_ns;
    uint32_t score;
    uint32_t n_long; /* how far the two below can be trusted: RING_ENOUGH_LONG */
    uint64_t long_ns, spread_ns; /* of the long ones: the mean, and the mean difference from it */
};

/* When the end of a wait is expected, in nanoseconds from its beginning; until == 0: unknown. */
struct ring_window {
    uint64_t from, until;
};

enum ring_kind { RING_IN_RECORD = RING_HISTORIES, RING_KINDS };

/* A wait: from when on, of what kind, and how long it was to be spun for. */
struct ring_bet {
    struct ring_habit *habit;
    uint64_t since, budget;
};

/* What one end knows of its waits. */
struct ring_guess {
    struct ring_habit habits[RING_KINDS];
    uint32_t history;       /* of the last waits between records, a bit each: it was short */
    uint32_t spins_failed;  /* one more for each, halved by one that succeeds */
    uint32_t spins_to_skip; /* before the next one, without any at all */
};

static inline int ring_expects_short(const struct ring_habit *habit) { return habit->score >= 2; }

static inline uint64_t ring_spin_budget(struct ring_guess *guess,
                                        const struct ring_habit *habit) {
    if (!ring_expects_short(habit)) return RING_SPIN_MIN_NS;
    if (guess->spins_to_skip > 0) {
        guess->spins_to_skip--;
        return 0;
    }
    uint64_t worth = habit->usual_ns * 2 + RING_SPIN_SLACK_NS;
    return worth < RING_SPIN_MAX_NS ? worth : RING_SPIN_MAX_NS;
}

static inline struct ring_bet ring_bet_on(struct ring_guess *guess, uint32_t kind,
                                          uint64_t since) {
    struct ring_habit *habit = &guess->habits[kind];
    return (struct ring_bet){habit, since, ring_spin_budget(guess, habit)};
}

/* When the next long wait of this kind is expected to end. It is half of the window that is spun
 * for where the guess is right, and RING_SHARE_SPUN bounds it. */
static inline struct ring_window ring_predict(const struct ring_habit *habit) {
    struct ring_window none = {0, 0};
    if (habit->n_long < RING_ENOUGH_LONG) return none;
    uint64_t margin = RING_LATE_NS + RING_MOST_SPREADS * habit->spread_ns;
    if (margin * RING_SHARE_SPUN > habit->long_ns) return none;
    return (struct ring_window){habit->long_ns - margin, habit->long_ns + margin};
}

/* A long wait is over. One that ended behind its window is left out of the mean; several in a row
 * say that the pattern has changed. */
static inline void ring_learn_long(struct ring_habit *habit, uint64_t waited) {
    struct ring_window window = ring_predict(habit);
    if (waited > RING_LONGEST_PREDICTED_NS || (window.until != 0 && waited > window.until)) {
        habit->n_long -= habit->n_long < RING_MISS_LONG ? habit->n_long : RING_MISS_LONG;
        if (habit->n_long < RING_ENOUGH_LONG) habit->n_long = 0;
        return;
    }
    uint64_t difference =
        waited > habit->long_ns ? waited - habit->long_ns : habit->long_ns - waited;
    if (habit->n_long == 0) {
        habit->long_ns = waited;
        habit->spread_ns = waited / 16;
    } else {
        habit->long_ns += waited / 8;
        habit->long_ns -= habit->long_ns / 9; /* 7/8 of the mean and 1/8 of the wait */
        habit->spread_ns += difference / 8;
        habit->spread_ns -= habit->spread_ns / 9;
    }
    if (habit->n_long < RING_MOST_LONG) habit->n_long++;
}

/* A wait is over. One that was expected to be short, and was, but not while this end spun, says
 * that the peer needs this very core: the more often, the rarer the next attempts. */
static inline void ring_learn(struct ring_guess *guess, const struct ring_bet *bet,
                              uint64_t now, int spun) {
    struct ring_habit *habit = bet->habit;
    uint64_t waited = now - bet->since;
    int is_short = waited < RING_SPIN_MAX_NS;
    if (is_short) {
        uint64_t faded = habit->usual_ns - habit->usual_ns / 4;
        habit->usual_ns = waited > faded ? waited : faded;
        if (habit->score < 3) habit->score++;
    } else {
        if (habit->score > 0) habit->score--;
        ring_learn_long(habit, waited);
    }
    if (habit < guess->habits + RING_HISTORIES)
        guess->history = (guess->history * 2 + (uint32_t)is_short) % RING_HISTORIES;
    if (bet->budget <= RING_SPIN_MIN_NS) return;
    if (spun) {
        guess->spins_failed /= 2;
    } else if (waited < 2 * RING_SPIN_MAX_NS) {
        if (guess->spins_failed < RING_MOST_FAILED) guess->spins_failed++;
        guess->spins_to_skip = (1u << guess->spins_failed) - 1;
    }
}

#endif
