/* How a launch that cannot go on says so: one line for people, and the end. */
#include "launch.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

int fail_fd = FD_STATUS;

static size_t append(char *line, size_t at, size_t size, const char *text) {
    while (*text && at + 1 < size) {
        line[at++] = (unsigned char)*text < 32 ? '?' : *text;
        text++;
    }
    return at;
}

void fail(const char *step, const char *what, int error, const char *hint) {
    char line[1024];
    size_t at = 0;
    at = append(line, at, sizeof line, step);
    at = append(line, at, sizeof line, ": ");
    at = append(line, at, sizeof line, what);
    if (error) {
        at = append(line, at, sizeof line, ": ");
        at = append(line, at, sizeof line, strerror(error));
    }
    if (hint && *hint) {
        at = append(line, at, sizeof line, ": ");
        at = append(line, at, sizeof line, hint);
    }
    line[at++] = '\n';
    while (write(fail_fd, line, at) < 0 && errno == EINTR) {}
    _exit(END_START_FAILED);
}
