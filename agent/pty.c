/* Terminals: see pty.h. The sandbox may have put anything in the place of /dev/ptmx and /dev/pts, so
 * each device is checked by its number, and the slave is taken from the master, not by name. */
#define _GNU_SOURCE
#include "pty.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <termios.h>
#include <unistd.h>

#include "path.h"

#ifndef TIOCGPTPEER
#define TIOCGPTPEER 0x5441
#endif
#define OPEN_TTY (O_RDWR | O_NOCTTY | O_NONBLOCK)

static bool is_device(int fd, unsigned low, unsigned high)
{
    struct stat st;

    return !fstat(fd, &st) && S_ISCHR(st.st_mode) && major(st.st_rdev) >= low && major(st.st_rdev) <= high;
}

static int open_master(void)
{
    static const char *const names[] = {"/dev/ptmx", "/dev/pts/ptmx"};

    for (int i = 0; i < 2; i++) {
        int fd = path_open(AT_FDCWD, names[i], OPEN_TTY, 0);
        if (fd < 0)
            continue;
        if (is_device(fd, 5, 5))
            return fd;
        close(fd);
        errno = ENODEV;
    }
    return -1;
}

static int open_slave(int master)
{
    char name[32];
    int number, fd = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);

    if (fd >= 0)
        return fd;
    /* gVisor has no TIOCGPTPEER */
    if (ioctl(master, TIOCGPTN, &number) < 0)
        return -1;
    snprintf(name, sizeof name, "/dev/pts/%d", number);
    fd = path_open(AT_FDCWD, name, O_RDWR | O_NOCTTY | O_NOFOLLOW, 0);
    if (fd >= 0 && !is_device(fd, 136, 143)) {
        close(fd);
        errno = ENODEV;
        return -1;
    }
    return fd;
}

int pty_open(int rows, int cols, const struct user *u, int *master, int *slave)
{
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)cols};
    int unlock = 0, error;

    *master = open_master();
    if (*master < 0)
        return errno;
    if (ioctl(*master, TIOCSPTLCK, &unlock) < 0 || (*slave = open_slave(*master)) < 0) {
        error = errno;
        close(*master);
        return error;
    }
    ioctl(*master, TIOCSWINSZ, &size);
    if (user_differs(u) && (fchown(*slave, u->uid, u->gid) < 0 || fchmod(*slave, 0620) < 0))
        return 0; /* where ids cannot be changed the command has the fd all the same */
    return 0;
}
