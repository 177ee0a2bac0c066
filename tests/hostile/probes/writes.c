/* Tries to change a file and its folder by every way there is. writes PATH FOLDER: lines "WAY ERRNO", 0: it worked. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>

static void say(const char *way, int result) { printf("%s %d\n", way, result < 0 ? errno : 0); }

static int and_close(int fd) {
    if (fd >= 0) close(fd);
    return fd;
}

int main(int argc, char **argv) {
    const char *path = argv[1], *scratch = argv[2];
    char through[128], beside[8192], mine[8192], folder[4096];
    struct timespec times[2] = {{1, 0}, {1, 0}};
    if (argc < 3) return 2;
    snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = 0;
    snprintf(beside, sizeof beside, "%s/sloplet-beside", folder);
    snprintf(mine, sizeof mine, "%s/mine", scratch);
    and_close(open(mine, O_CREAT | O_WRONLY, 0644));
    int fd = open(path, O_RDONLY);
    say("read", fd);
    snprintf(through, sizeof through, "/proc/self/fd/%d", fd);
    say("open-write", and_close(open(path, O_WRONLY | O_APPEND)));
    say("open-trunc", and_close(open(path, O_RDONLY | O_TRUNC)));
    say("proc-fd-write", and_close(open(through, O_WRONLY)));
    say("truncate", truncate(path, 0));
    say("ftruncate", ftruncate(fd, 0));
    say("fallocate", fallocate(fd, 0, 0, 1));
    say("chmod", chmod(path, 0777));
    say("fchmod", fchmod(fd, 0777));
    say("fchmodat2", (int)syscall(452, -100, path, 0777, 0x100));
    say("chown", chown(path, getuid(), getgid()));
    say("utimens", utimensat(AT_FDCWD, path, times, 0));
    say("futimens", futimens(fd, times));
    say("futimens-now", futimens(fd, NULL));
    say("utimes-empty", (int)syscall(SYS_utimensat, fd, "", times, AT_EMPTY_PATH));
    say("setxattr", setxattr(path, "user.x", "y", 1, 0));
    say("fsetxattr", fsetxattr(fd, "user.x", "y", 1, 0));
    say("setcap", setxattr(path, "security.capability", "\1\0\0\2\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 20, 0));
    int flags = 0, set = 0;
    say("getflags", ioctl(fd, FS_IOC_GETFLAGS, &flags));
    set = flags ^ FS_NOATIME_FL;
    say("setflags", ioctl(fd, FS_IOC_SETFLAGS, &set));
    struct fsxattr x;
    say("fsgetxattr", ioctl(fd, FS_IOC_FSGETXATTR, &x));
    x.fsx_xflags ^= FS_XFLAG_NODUMP;
    say("fssetxattr", ioctl(fd, FS_IOC_FSSETXATTR, &x));
    int version = 77;
    say("setversion", ioctl(fd, FS_IOC_SETVERSION, &version));
    say("mmap-shared", mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0);
    say("link-out", link(path, beside));
    snprintf(beside, sizeof beside, "%s/linked", scratch);
    say("link-in", link(path, beside));
    say("link-fd", linkat(AT_FDCWD, through, AT_FDCWD, beside, AT_SYMLINK_FOLLOW));
    say("link-empty", linkat(fd, "", AT_FDCWD, beside, AT_EMPTY_PATH));
    say("write-linked", and_close(open(beside, O_WRONLY)));
    int dir = open(folder, O_RDONLY | O_DIRECTORY);
    say("create", and_close(openat(dir, "sloplet-new", O_CREAT | O_WRONLY, 0644)));
    say("tmpfile", and_close(open(folder, O_TMPFILE | O_RDWR, 0600)));
    say("mkdir", mkdirat(dir, "sloplet-dir", 0755));
    say("symlink", symlinkat("/etc/passwd", dir, "sloplet-link"));
    say("mknod-fifo", mknodat(dir, "sloplet-fifo", S_IFIFO | 0600, 0));
    say("rename-away", rename(path, mine));
    say("rename-over", rename(mine, path));
    say("exchange", renameat2(AT_FDCWD, mine, AT_FDCWD, path, RENAME_EXCHANGE));
    say("unlink", unlink(path));
    say("fchmod-dir", fchmod(dir, 0777));
    int source = open(mine, O_RDWR);
    say("clone-range", ioctl(fd, FICLONE, source));
    say("copy-range", (int)copy_file_range(source, NULL, fd, NULL, 1, 0));
    int path_fd = open(path, O_PATH);
    snprintf(through, sizeof through, "/proc/self/fd/%d", path_fd);
    say("opath-chmod", chmod(through, 0777));
    say("opath-write", and_close(open(through, O_WRONLY)));
    say("flags-append", fcntl(fd, F_SETFL, O_RDWR) < 0 ? -1 : (int)write(fd, "x", 1));
    say("lease", fcntl(fd, F_SETLEASE, F_WRLCK));
    return 0;
}
