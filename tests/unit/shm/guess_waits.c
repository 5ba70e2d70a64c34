/*
 * What csrc/shm/guess.h foresees. Reads the lengths of waits in nanoseconds, one a line, and prints
 * before it learns from each when it would have expected the end: "from until", "0 0" for nothing.
 */
#include <inttypes.h>
#include <stdio.h>

#include "guess.h"

int main(void) {
    struct ring_guess guess = {0};
    uint64_t waited;
    while (scanf("%" SCNu64, &waited) == 1) {
        struct ring_bet bet = ring_bet_on(&guess, guess.history, 0);
        struct ring_window window = ring_predict(bet.habit);
        printf("%" PRIu64 " %" PRIu64 "\n", window.from, window.until);
        ring_learn(&guess, &bet, waited, 0);
    }
    return 0;
}
