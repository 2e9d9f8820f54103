/*
 * A route change across Postgres and Redis: a move, a split or a merge while messages flow. See README.md.
 *
 * An atomic block is one Lua script, one Postgres transaction, or one step inside a process; whatever may happen
 * between two of them may happen here. Processes are never told that they were slow: each of them is a zombie
 * whenever another one did its work first.
 *
 * Configuration (-D): a move (default), SPLIT or MERGE; DROP; N messages per LP (N_OTHER in the second); FALLS times
 * in all a node falls back: FALL_PARENT, FALL_BOTH parents, FALL_SUCCESSOR; DRIVERS and REARMERS, one or two of each;
 * FENCE_EPOCHS: the fence compares epochs too, and partitions are taken from an owner that many times.
 * All other switches remove or change one guard; check.sh lists them.
 */
#ifndef N
#define N 2
#endif
#ifndef N_OTHER
#define N_OTHER N
#endif
#define LAST_SEQ(lp) ((lp) == 0 -> N : N_OTHER)
#ifndef DRIVERS
#define DRIVERS 1
#endif
#ifndef REARMERS
#define REARMERS 1
#endif
#ifndef FALLS
#define FALLS 0
#endif

/* Parents are partitions 0 .. PARENTS-1, successors follow. */
#if defined(MERGE)
#define PARENTS 2
#define SUCCESSORS 1
#define LPS 2
#define FROM(lp) (lp)
#define TO(lp) 2
#elif defined(SPLIT)
#define PARENTS 1
#define SUCCESSORS 2
#define LPS 2
#define FROM(lp) 0
#define TO(lp) (1 + (lp))
#else
#define PARENTS 1
#define SUCCESSORS 1
#define LPS 1
#define FROM(lp) 0
#define TO(lp) 1
#endif
#define PARTITIONS (PARENTS + SUCCESSORS)
#define ROOM (N * LPS + 1)

/* A record is lp * 8 + seq; a command record is COMMAND + seal id. */
#define COMMAND 64
#define AT(p, i) log[(p) * ROOM + (i)]
#define MARK(p, lp) mark[(p) * LPS + (lp)]
#define IS_PARENT(p) ((p) < PARENTS)

/* States of the change. The intent to seal is a state of its own where a change can be dropped. */
#define PLANNED 0
#define SEALING 1
#define SEALED 2
#define OPENED 3
#define DONE 4
#define DROPPED 5
#define MUST_BE_SEALED(s) ((s) >= SEALED && (s) <= DONE)

/* States of a partition. A successor that is absent behaves like one that is importing. */
#define IMPORTING 0
#define OPEN 1
#define CLOSED 2

/* Redis: each partition is on a node of its own. */
byte log[PARTITIONS * ROOM], size[PARTITIONS], mark[PARTITIONS * LPS], settled[PARTITIONS];
byte state[PARTITIONS], seal[PARENTS], run_id[PARTITIONS];
byte seals = 0;                        /* seal ids given out */
#ifdef DROP_BY_MARK
bool refused[PARENTS];
#endif

/* Postgres. */
byte pg = PLANNED, recorded_seal[PARENTS], recorded_mark[LPS], armed[PARTITIONS], locked[PARTITIONS];
byte owner[PARTITIONS];                /* whose epoch is in force, 0: nobody's */
bool gate[PARENTS];
byte applied[LPS];                     /* what the fence knows */

#ifdef FENCE_EPOCHS
byte epochs = 0, thefts = 0, owner_epoch[PARTITIONS], fence_epoch[LPS];
#endif

byte falls = 0;
#ifdef NO_CHAIN
byte acknowledged[LPS];
#endif
hidden byte i_, j_, v_, base_;

#define ARMED(p) (run_id[p] == armed[p])
#define ALL_SETTLED(p) (settled[p] == (1 << size[p]) - 1)

#if defined(NO_GATE)
#define READABLE(p) true
#elif defined(FENCE_EPOCHS) && !defined(PARENT_AGAIN) && PARENTS == 2
#define READABLE(p) (IS_PARENT(p) -> !gate[(p) % PARENTS] : gate[0] && gate[1])
#elif defined(FENCE_EPOCHS) && !defined(PARENT_AGAIN)
#define READABLE(p) (IS_PARENT(p) -> !gate[0] : gate[0])
#elif PARENTS == 2 && defined(GATE_OF_ONE)
#define READABLE(p) (IS_PARENT(p) || gate[0] || gate[1])
#elif PARENTS == 2
#define READABLE(p) (IS_PARENT(p) || (gate[0] && gate[1]))
#else
#define READABLE(p) (IS_PARENT(p) || gate[0])
#endif

inline put(p, record)
{
    assert(size[p] < ROOM);
    AT(p, size[p]) = record;
    size[p]++
}

/* No seq is twice over all logs of its LP. What a fall-back lost is in no log. */
inline assert_new(record)
{
    i_ = 0;
    do
    :: i_ < PARTITIONS ->
        j_ = 0;
        do
        :: j_ < size[i_] -> assert(AT(i_, j_) != record); j_++
        :: else -> break
        od;
        i_++
    :: else -> break
    od;
    i_ = 0; j_ = 0
}

/*
 * Appends. Relays are many, their routes and cursors are as stale as can be: at any moment any of them may ask the
 * parent, or, once the route is there, the successor, to append anything. With the chain only mark + 1 changes
 * something, so a relay needs no state here.
 */
#ifdef NO_OWNERSHIP
#define ACCEPTS(p) (state[p] != IMPORTING)
#else
#define ACCEPTS(p) (state[p] == OPEN)
#endif

inline append(p, lp, known)
{
    atomic {
        known && ARMED(p) && ACCEPTS(p) && MARK(p, lp) < LAST_SEQ(lp) ->
        v_ = MARK(p, lp) + 1;
#ifdef NO_CHAIN
        if
        :: true
        :: acknowledged[lp] >= v_ && acknowledged[lp] < LAST_SEQ(lp) -> v_ = acknowledged[lp] + 1
        fi;
        if :: v_ > acknowledged[lp] -> acknowledged[lp] = v_ :: else fi;
#endif
        d_step { assert_new((lp) * 8 + v_); put(p, (lp) * 8 + v_); MARK(p, lp) = v_; v_ = 0 }
    }
}

proctype Relay()
{
end:
    do
    :: append(FROM(0), 0, true)
    :: append(TO(0), 0, (pg == DONE))
#if LPS == 2
    :: append(FROM(1), 1, true)
    :: append(TO(1), 1, (pg == DONE))
#endif
    od
}

/* The script that closes a parent: idempotent by the change. */
inline close_parent(p)
{
    if
    :: state[p] == OPEN -> seals++; seal[p] = seals; put(p, COMMAND + seals); state[p] = CLOSED
    :: else
    fi
}

/* The script that opens a successor with the recorded marks: idempotent by the change. */
inline open_successor(p)
{
    if
    :: state[p] == IMPORTING ->
#ifndef NO_MARKS
        i_ = 0;
        do
        :: i_ < LPS -> if :: TO(i_) == p -> MARK(p, i_) = recorded_mark[i_] :: else fi; i_++
        :: else -> break
        od;
        i_ = 0;
#endif
        state[p] = OPEN
    :: else
    fi
}

/* What the driver remembers of a parent: the seal's answer, and the run whose connection it came over. */
inline seal_parent(p)
{
#ifdef DROP_BY_MARK
    if
    :: atomic { ARMED(p) && !refused[p] -> close_parent(p); see(p) }
    :: pg != PLANNED -> goto next
    fi;
#else
    atomic { ARMED(p) -> close_parent(p); see(p) };
#endif
#ifdef LATE_RUN
    /* The run is taken from a later connection; only reading the seal back over it ties the two together. */
    atomic {
        ARMED(p) ->
        seen_run[p] = run_id[p];
#ifdef READ_BACK
        if :: state[p] != CLOSED || seal[p] != seen_seal[p] -> goto next :: else fi
#endif
    }
#endif
}

inline see(p)
{
    seen_seal[p] = seal[p];
    seen_run[p] = run_id[p];
    seen_mark[0] = (FROM(0) == p -> MARK(p, 0) : seen_mark[0]);
#if LPS == 2
    seen_mark[1] = (FROM(1) == p -> MARK(p, 1) : seen_mark[1]);
#endif
}

#ifdef NO_RUN_CONDITION
#define SAME_RUN(p) true
#else
#define SAME_RUN(p) (seen_run[p] == armed[p])
#endif
#ifdef NO_ROW_LOCK
#define FREE(p) true
#else
#define FREE(p) (locked[p] == 0)
#endif
#if PARENTS == 2
#define MAY_RECORD (SAME_RUN(0) && SAME_RUN(1))
#define NODES_FREE (FREE(0) && FREE(1))
#else
#define MAY_RECORD SAME_RUN(0)
#define NODES_FREE FREE(0)
#endif

proctype Driver()
{
    byte seen_seal[PARENTS], seen_run[PARENTS], seen_mark[LPS];

next:
    atomic {
        seen_seal[0] = 0; seen_run[0] = 0; seen_mark[0] = 0;
#if PARENTS == 2
        seen_seal[1] = 0; seen_run[1] = 0;
#endif
#if LPS == 2
        seen_mark[1] = 0
#endif
    };
    if
    :: pg <= SEALING
    :: pg == SEALED -> goto open
    :: pg == OPENED -> goto route
    :: pg >= DONE -> goto over
    fi;

#if defined(DROP) && !defined(NO_INTENT)
    atomic { if :: pg == PLANNED -> pg = SEALING :: pg == SEALING :: else -> goto next fi };
#endif
    seal_parent(0);
#if PARENTS == 2
#ifdef SEAL_ONE
    atomic { seen_run[1] = armed[1]; seen_mark[1] = MARK(1, 1) };
#else
    seal_parent(1);
#endif
#endif
    /* One transaction: the change's state, and the rows of the parents' nodes locked. */
    atomic {
        NODES_FREE ->
        if
        :: pg <= SEALING && MAY_RECORD ->
            recorded_seal[0] = seen_seal[0];
            recorded_mark[0] = seen_mark[0];
#if PARENTS == 2
            recorded_seal[1] = seen_seal[1];
#endif
#if LPS == 2
            recorded_mark[1] = seen_mark[1];
#endif
            pg = SEALED
        :: else
        fi
    };
    goto next;

open:
    atomic { ARMED(PARENTS) -> open_successor(PARENTS) };
#if SUCCESSORS == 2
    atomic { ARMED(PARENTS + 1) -> open_successor(PARENTS + 1) };
#endif
    atomic { if :: pg == SEALED -> pg = OPENED :: else fi };
    goto next;

route:
    atomic { if :: pg == OPENED -> pg = DONE :: else fi };
over:
    skip
}

#ifdef DROP
/* An operator who may drop the change, once, at any moment. */
proctype Operator()
{
    if
    :: true -> goto over
    :: true
    fi;
#ifdef DROP_BY_MARK
#ifdef DROP_REVERSED
    atomic { ARMED(1) -> if :: state[1] == CLOSED -> goto over :: else -> refused[1] = true fi };
#endif
    atomic { ARMED(0) -> if :: state[0] == CLOSED -> goto over :: else -> refused[0] = true fi };
#if PARENTS == 2 && !defined(DROP_REVERSED)
    atomic { ARMED(1) -> if :: state[1] == CLOSED -> goto over :: else -> refused[1] = true fi };
#endif
#endif
    atomic { if :: pg == PLANNED -> pg = DROPPED :: else fi };
over:
    skip
}
#endif

/*
 * Consumers of one group. Either may take any partition over at any moment; what the former owner has in hand goes
 * on as a zombie's. Records of different LPs are handled side by side, those of one LP in order.
 */
#ifdef NO_GATE_EPOCH
#define OWNS(p) true
#else
#define OWNS(p) (owner[p] == me)
#endif
#if defined(GATE_UNRECORDED)
#define PASSES(p) OWNS(p)
#elif defined(GATE_ANY_SEAL)
#define PASSES(p) (MUST_BE_SEALED(pg) && OWNS(p))
#else
#define PASSES(p) (MUST_BE_SEALED(pg) && recorded_seal[p] == record - COMMAND && OWNS(p))
#endif

#ifdef FENCE_EPOCHS
inline raise_fence(p, lp)
{
    if
    :: (FROM(lp) == p || TO(lp) == p) && fence_epoch[lp] < my_epoch -> fence_epoch[lp] = my_epoch
    :: else
    fi
}

#define MAY_TAKE(p) (owner[p] == me || owner[p] == 0 || thefts < FENCE_EPOCHS)
#else
#define MAY_TAKE(p) true
#endif

inline take(p)
{
    atomic {
        ARMED(p) && READABLE(p) && !ALL_SETTLED(p) && MAY_TAKE(p) ->
        partition = p; at = 0;
#ifdef FENCE_EPOCHS
        if :: owner[p] != me && owner[p] != 0 -> thefts++ :: else fi;
        if :: owner[p] != me -> epochs++; owner_epoch[p] = epochs :: else fi;
        my_epoch = owner_epoch[p];
        raise_fence(p, 0);
#if LPS == 2
        raise_fence(p, 1);
#endif
#endif
        owner[p] = me;
        do :: settled[p] & (1 << at) -> at++ :: else -> break od;
#if LPS == 2
        if
        :: true
        :: AT(p, at) < COMMAND ->
            /* The first unsettled record of the other LP, if there is one. */
            j_ = at + 1;
            do
            :: j_ < size[p] &&
                (settled[p] & (1 << j_) || AT(p, j_) >= COMMAND || AT(p, j_) / 8 == AT(p, at) / 8) -> j_++
            :: else -> break
            od;
            if :: j_ < size[p] -> at = j_ :: else fi;
            j_ = 0
        fi;
#endif
#ifdef GATE_EARLY
        if
        :: true
        :: AT(p, size[p] - 1) >= COMMAND && !(settled[p] & (1 << (size[p] - 1))) -> at = size[p] - 1
        fi;
#endif
        record = AT(p, at)
    }
}

proctype Consumer(byte me)
{
    byte partition, at, record;
#ifdef FENCE_EPOCHS
    byte my_epoch;
#endif

end:
    if
    :: take(0)
    :: take(1)
#if PARTITIONS == 3
    :: take(2)
#endif
    fi;
    if
    :: record >= COMMAND ->
        if
        :: atomic { PASSES(partition) -> gate[partition] = true }
        /* Look again only where there is something else to see; whoever is stuck is found waiting here. */
        :: atomic { gate[partition] }
        :: atomic { !gate[partition] && (at >= size[partition] || AT(partition, at) != record) -> goto again }
        :: atomic {
            !gate[partition] && !OWNS(partition) && MUST_BE_SEALED(pg) &&
            recorded_seal[partition] == record - COMMAND -> goto again
           }
        fi
#ifdef FENCE_EPOCHS
    :: record < COMMAND && my_epoch < fence_epoch[record / 8] && owner[partition] != me -> goto again
    :: record < COMMAND && my_epoch >= fence_epoch[record / 8] ->
        /* Stale owners are refused; one that is refused and still the owner waits here for ever. */
        atomic {
            if :: my_epoch < fence_epoch[record / 8] -> goto again :: else -> fence_epoch[record / 8] = my_epoch fi;
#else
    :: else ->
        atomic {
#endif
            v_ = record % 8;
#ifdef NO_FENCE
            assert(v_ == applied[record / 8] + 1 || v_ == applied[record / 8]);
            applied[record / 8] = v_;
#else
            if
            :: v_ <= applied[record / 8]
            :: else -> assert(v_ == applied[record / 8] + 1); applied[record / 8] = v_
            fi;
#endif
            v_ = 0
        }
    fi;
    atomic {
        if
        :: ARMED(partition) && owner[partition] == me -> settled[partition] = settled[partition] | (1 << at)
        :: else
        fi
    };
again:
    atomic {
        partition = 0; at = 0; record = 0;
#ifdef FENCE_EPOCHS
        my_epoch = 0
#endif
    };
    goto end
}

#if FALLS > 0
/*
 * A node restarts with a prefix of its history, as short as it likes: stream, marks, meta and acks fall back
 * together. Acks are taken to be any subset, which is more than any history allows.
 */
inline fall(p)
{
    atomic {
        falls < FALLS ->
        falls++; run_id[p]++;
        do
        :: size[p] > 0 ->
            size[p]--;
            settled[p] = settled[p] & ((1 << size[p]) - 1);
            v_ = AT(p, size[p]);
            AT(p, size[p]) = 0;
            if
            :: v_ >= COMMAND -> state[p] = OPEN; seal[p] = 0
            :: else ->
                v_ = v_ / 8;
                base_ = (IS_PARENT(p) -> 0 : recorded_mark[v_]);
                j_ = 0;
                do
                :: j_ < size[p] ->
                    if :: AT(p, j_) < COMMAND && AT(p, j_) / 8 == v_ -> base_ = AT(p, j_) % 8 :: else fi;
                    j_++
                :: else -> break
                od;
                MARK(p, v_) = base_
            fi
        :: break
        od;
        j_ = 0;
        do
        :: j_ < size[p] -> if :: true :: settled[p] = settled[p] & (255 - (1 << j_)) fi; j_++
        :: else -> break
        od;
        if
        :: true
        :: !IS_PARENT(p) && size[p] == 0 && state[p] == OPEN ->
            state[p] = IMPORTING;
            MARK(p, 0) = 0;
#if LPS == 2
            MARK(p, 1) = 0
#endif
        fi;
#if defined(DROP_BY_MARK) && !defined(DROP_MARK_KEPT)
        if :: true :: IS_PARENT(p) && state[p] == OPEN -> refused[p] = false fi;
#endif
        j_ = 0; v_ = 0; base_ = 0
    }
}

proctype Nature()
{
end:
    do
#ifdef FALL_PARENT
    :: fall(0)
#if PARENTS == 2 && defined(FALL_BOTH)
    :: fall(1)
#endif
#endif
#ifdef FALL_SUCCESSOR
    :: fall(PARENTS)
#endif
    od
}

/*
 * Arming, in one transaction that holds the node's row. With two of them the row is taken from one that is slow
 * (its transaction was ended); it goes on with Redis and can't commit.
 */
#if REARMERS == 2
#define MAY_LOCK(p) (locked[p] != me)
#else
#define MAY_LOCK(p) (locked[p] == 0)
#endif

inline lock(p)
{
    atomic { !ARMED(p) && MAY_LOCK(p) -> node = p; locked[p] = me; my_run = run_id[p]; saw = pg }
}

inline resend(lp)
{
    do
    :: FROM(lp) == node && MARK(node, lp) < recorded_mark[lp] ->
        MARK(node, lp) = MARK(node, lp) + 1;
        assert_new((lp) * 8 + MARK(node, lp));
        put(node, (lp) * 8 + MARK(node, lp))
    :: else -> break
    od;
#ifndef NO_CHAIN
    assert(FROM(lp) != node || MARK(node, lp) == recorded_mark[lp])
#endif
}

proctype Rearmer(byte me)
{
    byte node, my_run, saw, new_seal;

end:
    if
#ifdef FALL_PARENT
    :: lock(0)
#if PARENTS == 2 && defined(FALL_BOTH)
    :: lock(1)
#endif
#endif
#ifdef FALL_SUCCESSOR
    :: lock(PARENTS)
#endif
    fi;
    if
#ifndef NO_RESEAL
    :: MUST_BE_SEALED(saw) && IS_PARENT(node) ->
#ifndef NO_RESEND
        atomic {
            if
            :: run_id[node] != my_run -> goto abort
            :: run_id[node] == my_run && state[node] == OPEN ->
                resend(0);
#if LPS == 2
                resend(1)
#endif
            :: else
            fi
        };
#endif
        atomic {
            if
            :: run_id[node] != my_run -> goto abort
            :: else ->
#ifdef RESEAL_OVERWRITES
                if
                :: seal[node] != recorded_seal[node] && state[node] == CLOSED ->
                    seals++; seal[node] = seals; AT(node, size[node] - 1) = COMMAND + seals
                :: else -> close_parent(node)
                fi;
#else
                close_parent(node);
#endif
                new_seal = seal[node]
            fi
        }
#endif
#ifndef NO_REOPEN
    :: MUST_BE_SEALED(saw) && !IS_PARENT(node) ->
        atomic {
            if
            :: run_id[node] != my_run -> goto abort
#ifdef REOPEN_EMPTY
            :: else -> state[node] = OPEN
#else
            :: else -> open_successor(node)
#endif
            fi
        }
#endif
    :: else
    fi;
    /* Commit. The epochs of the node's partitions grow in the transaction that arms it. */
    atomic {
        if
        :: locked[node] == me ->
            if :: new_seal != 0 -> recorded_seal[node] = new_seal :: else fi;
            armed[node] = my_run;
#ifndef NO_EPOCH_RAISE
            owner[node] = 0;
#endif
            locked[node] = 0
        :: else
        fi;
        goto again
    };
abort:
    atomic { if :: locked[node] == me -> locked[node] = 0 :: else fi };
again:
    atomic { node = 0; my_run = 0; saw = 0; new_seal = 0 };
    goto end
}
#endif

/* When nothing can move any more, everything is where it belongs. */
proctype Judge()
{
end:
    atomic {
        timeout ->
        v_ = 0;
        do
        :: v_ < LPS -> assert(applied[v_] == LAST_SEQ(v_)); v_++
        :: else -> break
        od;
        v_ = 0;
        do
        :: v_ < PARTITIONS ->
            assert(ARMED(v_));
            assert(ALL_SETTLED(v_) || !READABLE(v_));
            v_++
        :: else -> break
        od;
        v_ = 0;
        do
        :: v_ < PARENTS ->
            assert(pg == DONE || pg == DROPPED);
            assert(state[v_] == (pg == DONE -> CLOSED : OPEN));
            assert(gate[v_] == (pg == DONE));
            v_++
        :: else -> break
        od;
        v_ = 0;
    }
}

init
{
    atomic {
        state[0] = OPEN;
#if PARENTS == 2
        state[1] = OPEN;
#endif
        run Relay();
        run Consumer(1);
        run Consumer(2);
        run Driver();
#if DRIVERS == 2
        run Driver();
#endif
#ifdef DROP
        run Operator();
#endif
#if FALLS > 0
        run Nature();
        run Rearmer(1);
#if REARMERS == 2
        run Rearmer(2);
#endif
#endif
        run Judge()
    }
}
