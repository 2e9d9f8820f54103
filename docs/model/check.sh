#!/usr/bin/env bash
# Check the models in all configurations, and that each guard is needed: check.sh [--quick] [MODEL] [VARIANT ...]
#
# One line per variant: what was expected, what was found, states, seconds. Ends with 1 when a variant that must be
# clean breaks, one that must break is clean, or a search does not complete. Needs spin and a C compiler.
set -uo pipefail

# Small searches take less time than an optimising compiler; long ones leave the machine to others.
quick="" optimise=-O1 politely="nice -n 10" only="" variants=""
for argument in "$@"; do
    case "$argument" in
        --quick) quick=1 optimise=-O0 politely="" ;;
        route_change|handover|parking|mixed_versions) only=$argument ;;
        -*|"") echo "usage: check.sh [--quick] [route_change|handover|parking|mixed_versions] [VARIANT ...]" >&2; exit 2 ;;
        *) variants+=" $argument " ;;
    esac
done

spin=${SPIN:-spin}
compiler=${CC:-cc}
for program in "$spin" "$compiler"; do
    if ! command -v "$program" >/dev/null 2>&1; then
        echo "note: $program is not installed, the models were not checked (Debian: apt-get install spin gcc)"
        exit 0
    fi
done

models=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
room=$(mktemp -d) || exit 1
trap 'rm -rf "$room"' EXIT
cd "$room" || exit 1

use() { # use MODEL: what is tried from here is of this model
    model=$1
    cp "$models/$1.pml" model.pml || exit 1
}

failed=0 tried=0
began=$SECONDS

# What a violated assertion means. Anything else is an error of the model itself.
meaning() {
    case "$1" in
        *"size["*"<"*"+1)"*) echo "model error: $1" ;;
        *new_form*) echo "stale" ;;
        *old_form*) echo "lost" ;;
        *busy*|*"!(from_pg)"*) echo "overlap" ;;
        *acted*) echo "stale" ;;
        *passed*|*">=(log["*) echo "lost" ;;
        *"handled&"*) echo "twice" ;;
        *"!((dead&"*) echo "dead" ;;
        *record/8*|*"record["*|*"applied|dead)&"*) echo "order" ;;
        *"run_id==armed"*) echo "stuck" ;;
        *"log["*) echo "twice" ;;
        *applied*|*parked*|*settled*|*run_id*|*pg*|*state*|*gate*) echo "stuck" ;;
        *) echo "model error: $1" ;;
    esac
}

search() { # search NAME SWITCHES: sets found and states
    found="not built" states=0
    rm -f pan pan.* out
    # shellcheck disable=SC2086 - switches are words
    "$spin" $2 -a model.pml >out 2>&1 || return
    "$compiler" "$optimise" -DSAFETY -DCOLLAPSE -DMEMLIM=1500 -o pan pan.c >out 2>&1 || return
    $politely ./pan -m100000 >out 2>&1
    states=$(awk '/states, stored/ { print $1; exit }' out)
    local violated
    violated=$(sed -n 's/^pan:1: \(.*\)/\1/p' out | head -1)
    if [[ $violated == *"invalid end state"* ]]; then
        found=stuck
    elif [ -n "$violated" ] && [[ $violated != *"assertion violated"* ]]; then
        found="incomplete: $violated"
    elif [ -n "$violated" ]; then
        found=$(meaning "$violated")
    elif grep -q -e "Search not completed" -e "out of memory" -e "max search depth too small" out \
        || ! grep -q "errors: 0" out; then
        found="incomplete"
    else
        found="clean"
    fi
}

try() { # try clean|breaks|spare quick|long NAME SWITCHES
    local expected=$1 size=$2 name=$3 switches=$4 verdict=ok from to
    [ -n "$quick" ] && [ "$size" = long ] && return
    [ -n "$only" ] && [ "$only" != "$model" ] && return
    [ -n "$variants" ] && [[ $variants != *" $name "* ]] && return
    tried=$((tried + 1))
    from=$(date +%s%N)
    search "$name" "$switches"
    to=$(date +%s%N)
    case "$expected:$found" in
        clean:clean|spare:clean|breaks:order|breaks:twice|breaks:stuck|breaks:overlap|breaks:stale|breaks:lost|breaks:dead) ;;
        *) verdict=FAILED; failed=1 ;;
    esac
    printf '%-6s  %-22s  expected %-6s  found %-7s  %9s states  %3d.%d s\n' "$verdict" "$name" "$expected" "$found" \
        "${states:-0}" $(((to - from) / 1000000000)) $(((to - from) / 100000000 % 10))
}

parent="-DFALLS=1 -DFALL_PARENT"
successor="-DFALLS=1 -DFALL_SUCCESSOR"
either="-DFALLS=1 -DFALL_PARENT -DFALL_SUCCESSOR"
by_mark="-DDROP -DNO_INTENT -DDROP_BY_MARK"

# -- route_change: the whole protocol.
use route_change
try clean quick move                "-DN=3 -DDRIVERS=2"
try clean quick move-fall           "-DN=2 $parent"
try clean long  move-fall-drivers   "-DN=2 $either -DDRIVERS=2"
try clean long  move-fall-twice     "-DN=2 -DFALLS=2 -DFALL_PARENT -DFALL_SUCCESSOR"
try clean long  move-fall-rearmers  "-DN=2 $either -DREARMERS=2"
try clean quick split               "-DN=2 -DSPLIT"
try clean long  split-drivers       "-DN=2 -DSPLIT -DDRIVERS=2"
try clean long  split-fall          "-DN=2 -DN_OTHER=1 -DSPLIT $either"
try clean quick merge               "-DN=2 -DMERGE"
try clean long  merge-drivers       "-DN=2 -DMERGE -DDRIVERS=2"
try clean long  merge-fall          "-DN=2 -DN_OTHER=1 -DMERGE $parent -DFALL_BOTH"
try clean quick drop                "-DN=1 -DDROP -DDRIVERS=2"
try clean long  drop-fall           "-DN=1 -DDROP -DDRIVERS=2 $parent"
try clean quick drop-merge          "-DN=1 -DDROP -DMERGE"
try clean long  drop-merge-fall     "-DN=1 -DDROP -DMERGE $parent -DFALL_BOTH"
try clean quick epochs              "-DN=2 -DFENCE_EPOCHS=3"
try clean long  epochs-fall         "-DN=2 -DFENCE_EPOCHS=3 $parent"
try clean long  epochs-split        "-DN=2 -DSPLIT -DFENCE_EPOCHS=3"
try clean long  epochs-merge        "-DN=1 -DMERGE -DFENCE_EPOCHS=3"

# One guard less.
try breaks quick no-ownership       "-DN=2 -DNO_OWNERSHIP"
try breaks quick no-gate            "-DN=2 -DNO_GATE"
try breaks quick gate-of-one        "-DN=2 -DMERGE -DGATE_OF_ONE"
try breaks quick gate-early         "-DN=2 -DGATE_EARLY"
try breaks long  gate-early-split   "-DN=2 -DSPLIT -DGATE_EARLY"
try breaks quick gate-unrecorded    "-DN=2 -DGATE_UNRECORDED $parent"
try breaks long  gate-any-zombie    "-DN=2 -DGATE_ANY_SEAL -DNO_GATE_EPOCH $parent"
try breaks quick no-fence           "-DN=2 -DNO_FENCE"
try breaks quick no-chain           "-DN=2 -DNO_CHAIN $parent"
try breaks quick no-marks           "-DN=2 -DNO_MARKS"
try breaks quick seal-one           "-DN=1 -DMERGE -DSEAL_ONE"
try breaks quick late-run           "-DN=2 -DLATE_RUN $parent"
try breaks quick no-run-condition   "-DN=2 -DNO_RUN_CONDITION $parent"
try breaks long  no-run-read-back   "-DN=2 -DLATE_RUN -DREAD_BACK -DNO_RUN_CONDITION $parent"
try breaks long  no-row-lock        "-DN=2 -DNO_ROW_LOCK $parent"
try breaks quick no-reseal          "-DN=2 -DNO_RESEAL $parent"
try breaks long  no-resend          "-DN=2 -DNO_RESEND $parent"
try breaks long  reseal-overwrites  "-DN=2 -DRESEAL_OVERWRITES $parent -DREARMERS=2"
try breaks long  no-epoch-raise     "-DN=2 -DNO_EPOCH_RAISE $parent"
try breaks long  no-reopen          "-DN=2 -DNO_REOPEN $successor"
try breaks long  reopen-empty       "-DN=2 -DREOPEN_EMPTY $successor"
try breaks quick no-intent          "-DN=1 -DDROP -DNO_INTENT"
try breaks long  drop-mark-reversed "-DN=1 $by_mark -DMERGE -DDROP_REVERSED"
try breaks long  drop-mark-fall     "-DN=1 $by_mark $parent"
try breaks long  drop-mark-kept     "-DN=1 $by_mark -DDROP_MARK_KEPT -DMERGE $parent"
try breaks long  parent-again       "-DN=2 -DFENCE_EPOCHS=3 -DPARENT_AGAIN"

# Guards that another one covers: clean without them, kept for the reason that README.md gives.
try spare long  late-run-read-back  "-DN=2 -DLATE_RUN -DREAD_BACK $parent"
try spare long  gate-any-seal       "-DN=2 -DGATE_ANY_SEAL $parent"
try spare long  no-gate-epoch       "-DN=2 -DNO_GATE_EPOCH $parent"
try spare long  drop-mark           "-DN=1 $by_mark -DMERGE"

# -- handover: the whole protocol.
use handover
try clean long  hand-over           "-DTHEFTS=0 -DMOVES=2"
try clean quick leases              "-DTHEFTS=2"
try clean long  leases-hand-over    "-DTHEFTS=1 -DMOVES=2"
try clean long  leases-deaths       "-DTHEFTS=2 -DDEATHS=1"
try clean quick leases-fall         "-DN=1 -DTHEFTS=1 -DFALLS=1"
try clean long  leases-fall-more    "-DN=2 -DTHEFTS=1 -DFALLS=1"
try clean long  leases-fall-twice   "-DN=1 -DTHEFTS=2 -DFALLS=1"
try clean long  leases-fall-move    "-DN=1 -DTHEFTS=1 -DMOVES=1 -DFALLS=1"
try clean long  leases-fall-abort   "-DN=1 -DTHEFTS=1 -DFALLS=1 -DABORTS=1"
try clean long  leases-fall-death   "-DN=1 -DTHEFTS=1 -DFALLS=1 -DDEATHS=1"

try clean quick reads-apart         "-DTHEFTS=1 -DREAD_APART"
try clean long  reads-apart-move    "-DTHEFTS=1 -DMOVES=1 -DREAD_APART"
try clean long  reads-apart-fall    "-DN=1 -DTHEFTS=1 -DFALLS=1 -DREAD_APART"

try clean quick words               "-DTHEFTS=0 -DDEATHS=1 -DWORDS"
try clean long  words-twice         "-DTHEFTS=0 -DDEATHS=2 -DWORDS"
try clean long  words-hand-over     "-DTHEFTS=0 -DMOVES=1 -DDEATHS=1 -DWORDS"
try clean long  words-leases        "-DTHEFTS=1 -DDEATHS=1 -DWORDS"
try clean long  words-fall          "-DN=1 -DTHEFTS=0 -DFALLS=1 -DDEATHS=1 -DWORDS"

# One guard less.
try breaks long  without-fence      "-DTHEFTS=1 -DNO_FENCE"
try breaks long  clock-only         "-DTHEFTS=1 -DCLOCK_ONLY"
try breaks quick fence-no-epoch     "-DTHEFTS=1 -DFENCE_NO_EPOCH"
try breaks long  fence-no-seq       "-DTHEFTS=1 -DFENCE_NO_SEQ"
try breaks quick ack-no-epoch       "-DTHEFTS=1 -DFALLS=1 -DNO_ACK_EPOCH"
try breaks long  no-raise           "-DTHEFTS=1 -DFALLS=1 -DNO_RAISE"
try breaks long  raise-postgres     "-DTHEFTS=1 -DFALLS=1 -DRAISE_POSTGRES_ONLY"
try breaks long  token-redis        "-DTHEFTS=1 -DFALLS=1 -DTOKEN_REDIS"
try breaks long  lower-epoch        "-DTHEFTS=1 -DFALLS=1 -DLOWER_ACCEPTED"
try breaks quick release-early      "-DTHEFTS=0 -DMOVES=1 -DRELEASE_EARLY"
try breaks quick word-guess         "-DTHEFTS=0 -DDEATHS=1 -DWORDS -DWORD_GUESS"
try breaks quick word-no-session    "-DTHEFTS=0 -DDEATHS=1 -DWORDS -DWORD_NO_SESSION"

# Covered, or only needed with something else.
try spare long  no-fence-raise      "-DTHEFTS=2 -DNO_FENCE_RAISE"
try spare long  no-lock-check       "-DN=1 -DTHEFTS=1 -DFALLS=1 -DREAD_APART -DNO_LOCK_CHECK"
try spare long  lower-epoch-calm    "-DTHEFTS=2 -DLOWER_ACCEPTED"

# -- parking: the whole protocol.
use parking
try clean quick park                "-DTHEFTS=1"
try clean long  park-lost           "-DTHEFTS=1 -DLOST=1"
try clean quick park-discard        "-DTHEFTS=1 -DDISCARDS=1"
try clean long  park-thefts         "-DTHEFTS=2 -DFAILS=3"
try clean long  park-discard-twice  "-DN=2 -DTHEFTS=2 -DDISCARDS=2 -DLOST=1"
try clean long  park-discard-thefts "-DTHEFTS=2 -DDISCARDS=1"
try clean long  park-fall           "-DN=2 -DTHEFTS=1 -DFALLS=1"
try clean long  park-fall-more      "-DTHEFTS=1 -DFALLS=1"
try clean long  park-fall-thefts    "-DN=2 -DTHEFTS=2 -DFALLS=1"
try clean long  park-fall-discard   "-DN=2 -DTHEFTS=1 -DFALLS=1 -DDISCARDS=1 -DLOST=1"

# One guard less.
try breaks long  hand-out-parked    "-DTHEFTS=1 -DHAND_OUT_PARKED"
try breaks quick unpark-early       "-DTHEFTS=1 -DUNPARK_BLIND"
try breaks quick settle-first       "-DTHEFTS=1 -DSETTLE_FIRST"
try breaks long  park-no-epoch      "-DTHEFTS=1 -DNO_PARK_EPOCH"
try breaks long  no-load            "-DTHEFTS=1 -DNO_LOAD"
try breaks long  start-unsettled    "-DTHEFTS=1 -DSTART_UNSETTLED"
try breaks long  turn-alone         "-DTHEFTS=1 -DLOST=1 -DTURN_ALONE"
try breaks long  no-learn-dead      "-DTHEFTS=1 -DDISCARDS=1 -DNO_LEARN_DEAD"
try breaks quick park-dead          "-DTHEFTS=1 -DDISCARDS=1 -DPARK_DEAD"

# Covered.
try spare long  no-living           "-DTHEFTS=1 -DDISCARDS=1 -DLOST=1 -DNO_LIVING"

# -- mixed_versions: the whole protocol.
use mixed_versions
try clean quick versions            "-DTHEFTS=1"
try clean quick versions-drain      "-DTHEFTS=1 -DDRAIN -DCANCELS=1"
try clean long  versions-more       "-DOLD=2 -DNEW=1 -DTHEFTS=2 -DDRAIN"
try clean long  versions-new        "-DOLD=1 -DNEW=2 -DTHEFTS=2 -DDRAIN"

# One guard less.
try breaks quick check-apart        "-DCHECK_APART"
try breaks quick admit-apart        "-DADMIT_APART"
try breaks quick no-version-gate    "-DNO_GATE"
try breaks quick force-at-once      "-DDRAIN -DFORCE_AT_ONCE"
try breaks quick overdue-unnoted    "-DNO_NOTE"
try breaks quick contract-early     "-DCONTRACT_EARLY"
try breaks quick say-what-it-read   "-DSAY_READ"
try breaks quick join-stale         "-DJOIN_STALE"

if [ "$tried" = 0 ]; then
    echo "no such variant:$variants" >&2
    exit 2
fi
echo "$((SECONDS - began)) s in all"
exit "$failed"
