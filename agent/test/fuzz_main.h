/* What the mutating driver (fuzz_main.c) and the makers of its inputs give each other. */
#ifndef SLOPLET_TEST_FUZZ_MAIN_H
#define SLOPLET_TEST_FUZZ_MAIN_H

#include <stddef.h>
#include <stdint.h>

uint32_t rnd(uint32_t below);
/* Makes an input that is nearly right, at most 32 KiB; its length. */
size_t make_input(uint8_t *p);

#endif
