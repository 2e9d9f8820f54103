/*
 * Two releases side by side: members that know protocol 1 only, or 1 and 2, while the version is finalized and the
 * contract step runs. See README.md.
 *
 * An atomic block is one Postgres transaction, or one step inside a process. No clock is in it: a lease runs out
 * whenever it likes, and a member goes on between any two of its steps as if it had heard of nothing.
 *
 * Configuration (-D): OLD members of the old release, NEW ones of the new release; RESTARTS of each after its end;
 * THEFTS leases run out; DRAIN: the finalization closes the gate first; CANCELS times it is opened again. All other
 * switches remove one guard; check.sh lists them.
 */
#ifndef OLD
#define OLD 1
#endif
#ifndef NEW
#define NEW 1
#endif
#ifndef RESTARTS
#define RESTARTS 1
#endif
#ifndef THEFTS
#define THEFTS 1
#endif
#ifndef CANCELS
#define CANCELS 0
#endif
#define ALL (OLD + NEW)
#define MOST(m) ((m) < OLD -> 1 : 2)

/* Postgres: the row `protocol`, and the members' rows. */
byte in_force = 1, serves_from = 1;
bool lives[ALL];    /* the lease is not noted as over */
bool overdue[ALL];  /* it ran out, and nobody noted it */
byte acts_on[ALL];
bool old_form = true; /* what only the old form uses is there, until the contract step */
bool new_form;        /* something is written in the new form */

byte thefts = THEFTS, cancels = CANCELS;
bool done;

hidden byte i_;
bool blocked;

#ifdef NO_GATE
#define REFUSED(m) false
#else
#define REFUSED(m) (MOST(m) < serves_from)
#endif

inline look() { /* does an older member live? */
    blocked = false; i_ = 0;
    do
    :: i_ < OLD ->
#ifdef NO_NOTE
        if :: lives[i_] && !overdue[i_] -> blocked = true :: else fi;
#else
        if :: lives[i_] && overdue[i_] -> lives[i_] = false; overdue[i_] = false :: else fi;
        if :: lives[i_] -> blocked = true :: else fi;
#endif
        i_++
    :: else -> break
    od
}

inline look_behind() { /* may a living member still write the old form? */
    blocked = false; i_ = 0;
    do
    :: i_ < ALL ->
#ifndef CONTRACT_EARLY
        if :: lives[i_] && acts_on[i_] < 2 -> blocked = true :: else fi;
#endif
        i_++
    :: else -> break
    od
}

proctype member(byte me) {
    byte act, read, left = RESTARTS;
begin:
    /* Versions are read as it connects. */
    atomic { read = in_force; if :: REFUSED(me) -> goto ended :: else fi };
#ifdef ADMIT_APART
    if :: REFUSED(me) -> goto ended :: else fi;
    atomic { lives[me] = true; overdue[me] = false; acts_on[me] = in_force; act = in_force };
#else
    atomic {
        if :: REFUSED(me) -> goto ended :: else fi;
        lives[me] = true; overdue[me] = false;
        acts_on[me] = in_force;
#ifdef JOIN_STALE
        act = read
#else
        act = in_force
#endif
    };
#endif
    do
    :: true -> atomic { /* a heartbeat: it says on what it acts, and reads what is in force */
            if
            :: lives[me] ->
                overdue[me] = false;
#ifdef SAY_READ
                acts_on[me] = in_force;
#else
                acts_on[me] = act;
#endif
                read = in_force;
                if :: REFUSED(me) -> goto drain :: else fi
            :: else -> goto again
            fi
        };
        /* From here on it acts on that; a write of before may still come first. */
        if
        :: atomic { lives[me] && act == 1 && MOST(me) == 2 -> assert(old_form) }
        :: true
        fi;
        if :: MOST(me) >= read -> act = read :: else fi
    :: true -> atomic { /* a write; without a living session its epoch is refused */
            if
            :: lives[me] && MOST(me) == 1 -> assert(!new_form)
            :: lives[me] && MOST(me) == 2 && act == 1 -> assert(old_form)
            :: lives[me] && MOST(me) == 2 && act == 2 -> new_form = true
            :: else -> skip
            fi
        }
    :: true -> atomic { lives[me] = false; overdue[me] = false; goto again } /* it ends, or is killed and noted */
    od;
drain:
    /* Its last messages, with the lease. */
    atomic { if :: lives[me] && MOST(me) == 1 -> assert(!new_form) :: else fi };
    atomic { lives[me] = false; overdue[me] = false };
again:
    if
    :: left > 0 -> left--; goto begin
    :: true
    fi;
ended:
    skip
}

active proctype leases() {
    do
    :: atomic { thefts > 0 && (lives[0] || lives[ALL - 1]) -> thefts--;
            if
            :: lives[0] -> overdue[0] = true
            :: lives[ALL - 1] -> overdue[ALL - 1] = true
            fi }
    :: thefts == 0 || done -> break
    od
}

active proctype finalizer() {
    do
#ifdef DRAIN
    :: in_force == 1 ->
#ifdef FORCE_AT_ONCE
        atomic { serves_from = 2; in_force = 2 };
#else
        atomic { serves_from = 2 };
#endif
        if
        :: cancels > 0 -> cancels--; atomic { if :: serves_from > in_force -> serves_from = in_force :: else fi }
        :: true
        fi
#endif
    :: in_force == 1 ->
#ifdef CHECK_APART
        atomic { look() };
        if :: !blocked -> atomic { serves_from = 2; in_force = 2 } :: else fi
#else
        atomic { look(); if :: !blocked -> serves_from = 2; in_force = 2 :: else fi }
#endif
    :: in_force == 2 -> break
    od;
    do
    :: true -> atomic { look_behind(); if :: !blocked -> old_form = false; done = true; break :: else fi }
    od
}

init {
    byte m = 0;
    atomic {
        do
        :: m < ALL -> run member(m); m++
        :: else -> break
        od
    }
}
