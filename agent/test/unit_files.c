/* Folders that root makes for somebody: which of them he gives away, and which links he follows. */
#include "../files.c"

#include <stdlib.h>

#include "check.h"

static struct user given;

static uid_t owner_of(int at, const char *name)
{
    struct stat st;

    return fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0 ? (uid_t)-1 : st.st_uid;
}

/* As after mkdirat(at, name): whatever is at the name by now. */
static bool given_away(int at, const char *name)
{
    int error = 0, fd = own_folder(at, name, &given, &error);

    CHECK(fd >= 0 && !error);
    close(fd);
    return owner_of(at, name) == given.uid;
}

static void test_own_folder(int at)
{
    int error = 0;

    CHECK(mkdirat(at, "fresh", 0700) == 0 && given_away(at, "fresh"));
    CHECK(mkdirat(at, "full", 0700) == 0 && mkdirat(at, "full/x", 0700) == 0 && !given_away(at, "full"));
    CHECK(mkdirat(at, "others", 0700) == 0 && fchownat(at, "others", 77, 77, 0) == 0 && !given_away(at, "others"));
    CHECK(symlinkat("full", at, "link") == 0);
    CHECK(own_folder(at, "link", &given, &error) < 0 && error && owner_of(at, "full") == 0);
}

static void test_make_parents(int at, const char *dir)
{
    char path[256];

    CHECK(symlinkat("full", at, "led") == 0 && fchownat(at, "led", 77, 77, AT_SYMLINK_NOFOLLOW) == 0);
    snprintf(path, sizeof path, "%s/led/x/new", dir);
    CHECK(make_parents(path, 0755, true, &given) == ELOOP && owner_of(at, "full/x/new") == (uid_t)-1);
    CHECK(make_parents(path, 0755, true, &(struct user){.uid = (uid_t)-1}) == 0 && owner_of(at, "full/x/new") == 0);
    snprintf(path, sizeof path, "%s/link/y/new", dir);
    CHECK(make_parents(path, 0755, true, &given) == 0 && owner_of(at, "full/y/new") == given.uid && owner_of(at, "full") == 0);
}

int main(void)
{
    char dir[] = "/tmp/sloplet-unit-XXXXXX", remove[64];
    int at;

    given.uid = given.gid = 1234;
    CHECK(mkdtemp(dir) != NULL);
    if (chown(dir, 77, 77) < 0) {
        printf("the unit tests of folders that are given away need several users: left out\n");
        return rmdir(dir) != 0;
    }
    at = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    test_own_folder(at);
    test_make_parents(at, dir);
    close(at);
    snprintf(remove, sizeof remove, "rm -r %s", dir);
    CHECK(system(remove) == 0);
    return checked("folders that are given away");
}
