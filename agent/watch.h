/* WATCH: changes of files, by inotify. */
#ifndef SLOPLET_WATCH_H
#define SLOPLET_WATCH_H

#include <stdint.h>

/* Runs what is due (half a rename that waited for its other half); when to call next. */
int64_t watch_timers(int64_t now);

#endif
