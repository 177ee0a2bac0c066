# The R kernel: runs code cells, one after another, in the global environment. The protocol is kernel.py's, but for its
# requests, which are words: R has no JSON of its own.
#
# Runs INSIDE a sandbox, under whatever R (4 or newer) is there, without packages. Plots are drawn into PNG files of a folder
# of this process and told at the end of the cell.
local({
  PIECE <- 2880L; MOST <- 16 * 1024^2; MOST_TEXT <- 1024^2; MOST_TRACE <- 64 * 1024
  digits <- c(LETTERS, letters, 0:9, "+", "/")
  cell <- ""; count <- 0L
  folder <- tempfile("sloplet-plots-")

  say <- function(what, where = stdout()) {
    cat(paste0("\036", key, " ", cell, " ", what, "\n"), file = where)
    flush(where)
  }
  base64 <- function(raw) {
    short <- (3L - length(raw) %% 3L) %% 3L
    three <- matrix(c(as.integer(raw), integer(short)), nrow = 3L)
    all <- three[1, ] * 65536L + three[2, ] * 256L + three[3, ]
    made <- digits[rbind(all %/% 262144L, (all %/% 4096L) %% 64L, (all %/% 64L) %% 64L, all %% 64L) + 1L]
    if (short > 0L) made[(length(made) - short + 1L):length(made)] <- "="
    paste(made, collapse = "")
  }
  send <- function(name, raw, most = MOST) {
    if (is.character(raw)) raw <- charToRaw(enc2utf8(paste(raw, collapse = "\n")))
    if (length(raw) > most) { raw <- raw[seq_len(most)]; say("cut") }
    at <- 1L
    while (at <= length(raw)) {
      say(paste("data", name, base64(raw[at:min(length(raw), at + PIECE - 1L)])))
      at <- at + PIECE
    }
  }
  text <- function(word) { # x and hexadecimal digits
    if (nchar(word) < 2L) return("")
    starts <- seq(2L, nchar(word), 2L)
    made <- rawToChar(as.raw(strtoi(substring(word, starts, starts + 1L), 16L)))
    Encoding(made) <- "UTF-8"
    made
  }

  # -- plots

  open_device <- function(...) {
    dir.create(folder, showWarnings = FALSE)
    grDevices::png(file.path(folder, "%05d.png"), width = 7, height = 5, units = "in", res = 100, type = "cairo")
  }
  show_plots <- function() {
    while (!is.null(grDevices::dev.list())) grDevices::dev.off()
    for (path in list.files(folder, full.names = TRUE)) {
      raw <- readBin(path, "raw", file.size(path))
      unlink(path)
      if (length(raw) > MOST) { say("cut"); next }
      send("text/plain", "<plot>")
      send("image/png", raw)
      say("shown")
    }
  }

  # -- running

  leave <- function(...) stop("quit() ends only the cell here", call. = FALSE)
  attach(list(q = leave, quit = leave), name = "sloplet", warn.conflicts = FALSE)
  options(device = open_device, warn = 1L, keep.source = TRUE, menu.graphics = FALSE, browserNLdisabled = TRUE)

  represented <- function(value) {
    shown <- utils::capture.output(if (isS4(value)) methods::show(value) else print(value))
    if (inherits(value, c("ggplot", "trellis"))) return(NULL) # printing was drawing
    paste(shown, collapse = "\n")
  }
  run <- function(source) {
    parts <- parse(text = source, keep.source = TRUE, encoding = "UTF-8")
    for (at in seq_along(parts)) {
      made <- withVisible(eval(parts[[at]], globalenv()))
      if (!made$visible) next
      if (at < length(parts)) { print(made$value); next }
      told <- represented(made$value)
      if (!is.null(told)) { send("text/plain", told, MOST_TEXT); say("value") }
    }
  }
  fail <- function(name, message, trace) {
    send("name", name)
    send("message", message, MOST_TRACE)
    send("traceback", trace, MOST_TRACE)
    say("error")
  }
  failed <- function(error) {
    name <- setdiff(class(error), c("simpleError", "simpleCondition", "error", "condition"))
    call <- conditionCall(error)
    where <- if (is.null(call) || identical(call[[1L]], quote(parse))) "Error: " else
      paste0("Error in ", paste(utils::head(deparse(call), 3L), collapse = " "), " : ")
    fail(if (length(name)) name[1L] else "Error", conditionMessage(error), paste0(where, conditionMessage(error)))
  }
  interrupted <- function(...) fail("KeyboardInterrupt", "the cell was interrupted", "KeyboardInterrupt")

  # A fork's random numbers must not be its sister's.
  generation <- function() {
    nothing <- function(...) ""
    tryCatch(readLines(Sys.getenv("SLOPLET_GENERATION_FILE"), 1L, warn = FALSE), error = nothing, warning = nothing)
  }
  seen <- generation()
  look_at_generation <- function() {
    now <- generation()
    if (!identical(now, seen)) set.seed(readBin("/dev/urandom", "integer", 1L))
    seen <<- now
  }

  serve <- function(words) {
    cell <<- words[2L]
    count <<- count + 1L
    tryCatch(Sys.sleep(0.001), interrupt = function(...) NULL) # one that came too late for the cell before
    say(paste("begin", count))
    say("begin", stderr())
    before <- character()
    tryCatch({
      look_at_generation()
      if (words[3L] == "file") {
        path <- text(words[4L])
        words <- c(words[1:2], "code", strsplit(readLines(path, warn = FALSE), " ", fixed = TRUE)[[1L]])
        unlink(path)
      }
      at <- 5L
      while (at < length(words)) {
        name <- text(words[at])
        before[name] <- Sys.getenv(name, unset = NA)
        do.call(Sys.setenv, stats::setNames(list(text(words[at + 1L])), name))
        at <- at + 2L
      }
      run(text(words[4L]))
    }, error = failed, interrupt = interrupted)
    while (sink.number() > 0L) sink()
    tryCatch(show_plots(), error = failed, interrupt = interrupted)
    for (name in names(before)) {
      if (is.na(before[[name]])) Sys.unsetenv(name) else do.call(Sys.setenv, as.list(before[name]))
    }
    say("end 0")
    say("end", stderr())
  }

  repeat {
    line <- tryCatch(readLines(requests, 1L, warn = FALSE), interrupt = function(...) "")
    if (length(line) == 0L) break
    words <- strsplit(line, " ", fixed = TRUE)[[1L]]
    # What was cancelled has begun already: a line is read when the one before has ended.
    if (length(words) > 3L && words[1L] == key) serve(words)
  }
})
