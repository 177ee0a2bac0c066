exec 7<&0 8>&1 9>&2 2>/dev/null
PS1= PS2= PROMPT_COMMAND= sloplet_cell= sloplet_count=0 sloplet_exit= sloplet_lent=
command set +m
command set +H
command set +o history
unset ENV HISTFILE
sloplet_begin() {
  sloplet_cell=$1 sloplet_count=$((sloplet_count + 1))
  printf '\036@KEY@ %s begin %s\n' "$1" "$sloplet_count" >&8
  printf '\036@KEY@ %s begin\n' "$1" >&9
}
# Variables for one cell: what they were before comes back at its end.
sloplet_lend() {
  while [ $# -gt 1 ]; do
    eval "sloplet_had_$1=\${$1+x} sloplet_was_$1=\${$1-}"
    sloplet_lent="$sloplet_lent$1 "
    command export "$1=$2"
    shift 2
  done
}
sloplet_end() {
  sloplet_status=$?
  while [ -n "${sloplet_lent-}" ]; do
    sloplet_name=${sloplet_lent%% *} sloplet_lent=${sloplet_lent#* }
    if eval "[ -n \"\$sloplet_had_$sloplet_name\" ]"; then
      eval "$sloplet_name=\$sloplet_was_$sloplet_name"
    else
      unset "$sloplet_name"
    fi
    unset "sloplet_had_$sloplet_name" "sloplet_was_$sloplet_name"
  done
  [ -n "$sloplet_cell" ] || return 0
  printf '\036@KEY@ %s end %s\n' "$sloplet_cell" "$sloplet_status" >&8
  printf '\036@KEY@ %s end\n' "$sloplet_cell" >&9
  sloplet_cell=
}
# What exit and set -e end is the cell: bash hands its variables, functions and aliases on to its successor.
sloplet_state() {
  echo 'exec 2>/dev/null'
  declare -p
  declare -f
  alias -p
  printf 'cd -- %q\n' "$PWD"
  echo 'unset ENV HISTFILE; set +m +H +o history; builtin trap sloplet_leave EXIT; exec 1>&8 2>&9'
}
# An EXIT trap of the cell's runs when the cell is ended so; ours stays.
sloplet_trap() {
  case $BASH_SUBSHELL:${1-} in
    0:-[pl]* | [1-9]*) builtin trap "$@"; return ;;
    0:--) shift ;;
  esac
  if [ $# -lt 2 ]; then builtin trap "$@"; return; fi
  local sloplet_word=$1 sloplet_others= sloplet_signal
  shift
  for sloplet_signal do
    case $sloplet_signal in
      EXIT | exit | SIGEXIT | 0) sloplet_exit=$sloplet_word; [ "$sloplet_word" != - ] || sloplet_exit= ;;
      *) sloplet_others="$sloplet_others $sloplet_signal" ;;
    esac
  done
  [ -z "$sloplet_others" ] || builtin trap -- "$sloplet_word" $sloplet_others
}
sloplet_leave() {
  sloplet_status=$?
  command set +eu
  sloplet_word=$sloplet_exit; sloplet_exit=
  (exit "$sloplet_status")
  (eval "$sloplet_word"; exit "$sloplet_status") # which may itself say exit
  sloplet_end
  eval 'exec bash --noprofile --noediting --rcfile <(sloplet_state) -i <&7 1>&8 2>/dev/null' # what sh cannot even read
}
[ -z "$BASH_VERSION" ] || { trap sloplet_leave EXIT; eval 'trap() { sloplet_trap "$@"; }'; }
exec 2>&9
