# Shared by scripts/test and scripts/try: packages, Python, the virtual environment. Sourced, not run.

say() { printf '\033[1m%s\033[0m\n' "$*"; }
note() { printf '\033[2m%s\033[0m\n' "$*"; }
fail() { printf '\033[31m%s\033[0m\n' "$*" >&2; exit 1; }
[ -t 1 ] || { say() { printf '%s\n' "$*"; }; note() { printf '%s\n' "$*"; }; }

# as_root CMD...: as root, if we are or may become so without being asked for a password.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo -n "$@"
    else return 1; fi
}

# need COMMAND=PACKAGE /FILE=PACKAGE...: install the packages of what is missing. What is there is not talked about.
# Sets MISSING to what could not be installed.
need() {
    local pair packages=() missing=()
    MISSING=""
    for pair in "$@"; do
        [ -e "${pair%%=*}" ] || PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%=*}" >/dev/null || { packages+=("${pair#*=}"); missing+=("${pair%%=*}"); }
    done
    [ ${#packages[@]} -gt 0 ] || return 0
    if command -v apt-get >/dev/null && as_root true; then
        note "installing: ${packages[*]}"
        local log; log=$(mktemp)
        if ! as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}" >"$log" 2>&1; then
            as_root apt-get update -q >"$log" 2>&1 || true
            as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${packages[@]}" >"$log" 2>&1 ||
                { tail -n 5 "$log" >&2; MISSING="${missing[*]}"; }
        fi
        rm -f "$log"
    else
        MISSING="${missing[*]}"
    fi
}

# find_python [RUNNER...]: the first Python >= 3.11 that has venv and that RUNNER (say, another user) can run.
find_python() {
    local python
    for python in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if "$@" "$python" -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$@" "$python" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    return 1
}

# make_venv FOLDER PYTHON PIP-ARGUMENTS...: as asked for, unless it already is.
make_venv() {
    local folder=$1 python=$2; shift 2
    local stamp key; key=$(printf '%s\n' "$@" | cksum | cut -d' ' -f1)   # one stamp for each way it is installed
    stamp=$(printf '%s\n' "$python" "$(cat pyproject.toml scripts/hatch_build.py)" | sha256sum)
    if [ "$(cat "$folder/.stamp-$key" 2>/dev/null)" = "$stamp" ]; then return 0; fi
    note "setting up $folder (once)"
    [ -x "$folder/bin/python" ] && "$folder/bin/python" -c 'import pip' 2>/dev/null || { rm -rf "$folder"; "$python" -m venv "$folder"; }
    local log; log=$(mktemp)
    "$folder/bin/python" -m pip install -q --disable-pip-version-check "$@" >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; return 1; }
    rm -f "$log"
    printf '%s\n' "$stamp" >"$folder/.stamp-$key"
}
