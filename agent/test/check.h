/* Checks of the unit tests: a failed one is told, and the others go on. */
#ifndef SLOPLET_TEST_CHECK_H
#define SLOPLET_TEST_CHECK_H

#include <stdio.h>

__attribute__((weak)) int failures; /* one for all files of a test */

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            failures++;                                                                            \
        }                                                                                          \
    } while (0)

static inline int checked(const char *what)
{
    if (failures)
        printf("%d checks of %s failed\n", failures, what);
    else
        printf("all unit tests of %s passed\n", what);
    return failures != 0;
}

#endif
