/* A terminal of the sandbox's own devpts. */
#ifndef SLOPLET_PTY_H
#define SLOPLET_PTY_H

#include "users.h"

/* Opens a pair of the given size, the slave belonging to the user. 0 or an errno. */
int pty_open(int rows, int cols, const struct user *u, int *master, int *slave);

#endif
