/* What CHANGES is about to tell, shared by its walk (changes.c) and its records (changes_tell.c). */
#ifndef SLOPLET_CHANGES_H
#define SLOPLET_CHANGES_H

#include "attributes.h"
#include "files.h"
#include "layers.h"
#include "links.h"
#include "records.h"
#include "tree.h"

#define NAMES_BUF 16384
#define NAME_MAX_BYTES (RECORD_MAX / 4)

struct changes {
    struct walk walk;
    struct records records;
    struct links links;
    struct layer layer;
    bool walking, contents, attributes, listing, layers;
    int next_layer;
    size_t next_gone;
    dev_t dev, upper;  /* of the folders to enter; of files that are not the image's (a listing) */
    off_t folder_unit; /* a listing: folders that were written to have a multiple of it as size and no blocks; 0: who knows */
    int file; /* whose content is being told, or -1 */
    int64_t offset, size;
    int names; /* the folder whose entries are being told, or -1 */
    char *names_buf;
    int64_t count, bytes;
    int error;
    char wrong[256]; /* what the error is about */
};

extern char changes_path[NAME_MAX_BYTES + 512]; /* of the entry at hand, without a leading slash; "" is the root */

/* The first failure ends the operation; it is about changes_path. */
void changes_failed(struct changes *c, int error);
/* Makes changes_path of a name in the folder being walked ("": that folder). False if it is too long. */
bool changes_name(struct changes *c, const char *name);
/* Gone, or replaced by a link or another type, while we looked. */
bool vanished(int error);
/* Without root's rights, an owner can read what is his only after allowing it to himself. After a failed open: true if that was
 * the reason and is mended; take_back_rights then. */
bool lend_rights(int dir, const char *name, const struct stat *st, mode_t more);
void take_back_rights(int dir, const char *name, const struct stat *st);

/* One record each, about changes_path. `of`: whose attributes may be told, or NULL. */
void tell(struct changes *c, const struct stat *st, const struct attributes_of *of, const char *link, int64_t flags, const char *same_as);
void tell_removed(struct changes *c);
void tell_symlink(struct changes *c, int dir, const char *name, const struct stat *st);
/* With contents, c->file is left open for tell_piece. */
void tell_file(struct changes *c, int dir, const char *name, struct stat *st);
void tell_piece(struct changes *c);
/* A folder that the walk has entered, or begins with. In a listing, c->names is left open for tell_names. */
void tell_folder(struct changes *c, const struct stat *st);
void tell_names(struct changes *c, const struct stat *st);

#endif
