/*
 * A key that fails: it is parked in Postgres, what follows it goes there too, is handled from there in order, and the
 * key is in line again when nothing of it waits; while owners change at any moment, the node falls back, and operators
 * act. See README.md.
 *
 * An atomic block is one Lua script, one Postgres transaction, or one step inside a process. A member's threads (reader,
 * worker, settler, parking worker) are one loop that takes any step that is possible, so all their interleavings are there; what
 * it does never waits for hearing that it is not the owner any more.
 *
 * Configuration (-D): N messages of one key; FAILS attempts fail; THEFTS times the partition is given to the other
 * member; LOST answers of Postgres never come; DISCARDS times an operator lets what is parked die; FALLS times the node
 * falls back. All other switches remove one guard; check.sh lists them.
 */
#ifndef N
#define N 3
#endif
#ifndef FAILS
#define FAILS 2
#endif
#ifndef THEFTS
#define THEFTS 1
#endif
#ifndef LOST
#define LOST 0
#endif
#ifndef DISCARDS
#define DISCARDS 0
#endif
#ifndef FALLS
#define FALLS 0
#endif

/* Sets of messages: bit i is seq i + 1, which is offset i. The stream never changes: the relay repeats what falls. */
#define ALL ((1 << N) - 1)
#define SEQ(i) (1 << (i))
#define FIRST(set) ((set) & 1 -> 0 : ((set) & 2 -> 1 : 2))

/* Redis: acks, and the pull lock's epoch, which names its owner. */
byte settled, lock_epoch, run_id;

/* Postgres: the assignment, the key's row, its parked and dead messages, the fence. */
#define IN_LINE 0
#define WAITING 1
#define STARTED 2
byte owner = 1, epoch = 1, armed;
byte key = IN_LINE, parked, dead;
byte fence_epoch, applied;

byte thefts = THEFTS, fails = FAILS, lost = LOST, discards = DISCARDS, falls = FALLS;


hidden byte i_;

#define ARMED (run_id == armed)
#ifdef UNPARK_BLIND
#define UNDECIDED !decided
#else
#define UNDECIDED true
#endif
/* parked_messages_put: what is dead by now is not parked again. */
#ifdef PARK_DEAD
#define LIVING(set) (set)
#else
#define LIVING(set) ((set) & ~dead)
#endif
#define MINE (lock_epoch == my_epoch)
#define IN_FORCE (owner == me && epoch == my_epoch)

/* parking/store.py, write: parking_hold, before anything is written. */
#ifdef NO_PARK_EPOCH
#define MAY_WRITE true
#else
#define MAY_WRITE IN_FORCE
#endif

/* Message i may be handled only if all before it are applied or dead. */
#define IN_ORDER(i) (((applied | dead) & (SEQ(i) - 1)) == SEQ(i) - 1)

/* What was read of the key and waits for the parking worker goes into the page of a turn too, ahead of it. */
inline put_lane()
{
#ifdef TURN_ALONE
    skip
#else
    if
    :: key && lane -> parked = parked | LIVING(lane); passed = passed | lane; lane = 0
    :: else
    fi
#endif
}

inline learn_dead()
{
#ifndef NO_LEARN_DEAD
    known_dead = known_dead | (dead & ~settled);
#endif
    passed = passed | (lane & known_dead);
    lane = lane & ~known_dead;
    knows = IN_LINE
}

inline go_on()
{
    if
    :: key == IN_LINE -> learn_dead()
    :: key && parked ->
        key = STARTED;
        from_pg = FIRST(parked) + 1;
        assert(!(dead & SEQ(from_pg - 1)))
#ifdef UNPARK_BLIND
    :: key && !parked -> decided = true
#else
    :: key && !parked -> key = IN_LINE; knows = IN_LINE
#endif
    fi
}

proctype Member(byte me)
{
    byte my_epoch;
    bool open;                         /* what is parked is known */
    byte before;                       /* settled, as it was when the lock was taken */
    byte read;                         /* how many messages were looked at */
    byte lane;                         /* read and not begun, in order */
    byte hand, from_pg;                /* with a worker: i + 1 of the stream's, of Postgres's */
    byte passed;                       /* to be settled */
    byte knows = IN_LINE;              /* what this member has in memory of the key; entering: Postgres is to be told */
#define ENTERING 3
    byte unsettled;                    /* parked by a former owner, and maybe not settled */
    byte known_dead;
    bool from_pg_done;
    byte handled;                      /* from Postgres, in this holding: only looked at by an assertion */
#ifdef SETTLE_FIRST
    byte batch;
#endif
#ifdef UNPARK_BLIND
    bool decided;
#endif

end:
    do
    /* -- taking over ------------------------------------------------------------------------------------------------ */
    :: atomic {
        !my_epoch && owner == me && ARMED && lock_epoch <= epoch && (settled != ALL || key || parked) ->
        my_epoch = epoch; lock_epoch = epoch; before = settled
       }
    :: atomic {
        /* ledger.load, once the lock is taken. */
        my_epoch && !open ->
        if
        :: IN_FORCE ->
            open = true;
            known_dead = dead & ~before;
#ifndef NO_LOAD
            knows = (key -> WAITING : IN_LINE);
#ifndef START_UNSETTLED
            unsettled = (key -> parked & ~before : 0)
#endif
#endif
        :: else -> my_epoch = 0; before = 0
        fi
       }
    /* -- the stream: reading.py, holdings.admit ---------------------------------------------------------------------- */
    :: atomic {
        open && read < N && ARMED && MINE ->
        if
        :: before & SEQ(read)
        :: !(before & SEQ(read)) && known_dead & SEQ(read) -> passed = passed | SEQ(read)
        :: else -> lane = lane | SEQ(read)
        fi;
        read++
       }
    :: atomic {
        /* dispatch: a lane of a key that is in line goes to a worker. */
#ifdef HAND_OUT_PARKED
        open && !hand && !from_pg && lane ->
#else
        open && !hand && lane && knows == IN_LINE ->
#endif
        assert(!from_pg);
        hand = FIRST(lane) + 1;
        lane = lane & ~SEQ(hand - 1);
        /* What died before it was begun is not handled. */
        assert(!IN_FORCE || !(dead & SEQ(hand - 1)));
        assert(!IN_FORCE || !(handled & SEQ(hand - 1)))
       }
    :: atomic {
        /* It fails, and is to be parked. */
        hand && fails ->
        fails--;
        lane = lane | SEQ(hand - 1);
        hand = 0;
        knows = ENTERING
       }
    :: atomic {
        /* It takes effect, in a transaction with the fence. */
        hand ->
        if
        :: fence_epoch > my_epoch -> goto drop
        :: else ->
            fence_epoch = my_epoch;
            if
            :: applied & SEQ(hand - 1)
            :: else -> assert(IN_ORDER(hand - 1)); applied = applied | SEQ(hand - 1)
            fi;
            passed = passed | SEQ(hand - 1);
            hand = 0
        fi
       }
    :: atomic {
        /* lua/offsets_settle.lua, under the epoch. */
        passed && ARMED ->
        if
        :: MINE ->
            /* Nothing is settled that is nowhere else. */
            assert(((applied | parked | dead) & passed) == passed);
            settled = settled | passed;
            unsettled = unsettled & ~passed;
            passed = 0
        :: else -> goto drop
        fi
       }
    /* -- the parking worker: parking_worker.py, and parking/store.py under one transaction ------------------------------------------- */
#ifdef SETTLE_FIRST
    :: atomic {
        open && knows != IN_LINE && lane && !batch && !hand -> batch = lane; passed = passed | lane; lane = 0
       }
    :: atomic {
        batch ->
        if
        :: !MAY_WRITE -> goto drop
        :: MAY_WRITE && (key || knows == ENTERING) ->
            key = (key -> key : WAITING);
            parked = parked | batch; batch = 0; knows = WAITING
        :: else -> lane = lane | batch; passed = passed & ~batch; batch = 0; knows = IN_LINE
        fi
       }
#else
    :: atomic {
        open && knows != IN_LINE && lane && !hand && (key || knows == ENTERING || !from_pg) ->
        if
        :: !MAY_WRITE -> goto drop
        :: else ->
            if
#ifdef NO_LIVING
            :: knows == ENTERING && key == IN_LINE -> key = WAITING
#else
            /* _living: a key is not parked for a head that is dead by now. */
            :: knows == ENTERING && key == IN_LINE && !(dead & SEQ(FIRST(lane))) -> key = WAITING
#endif
            :: else
            fi;
            if
            :: key -> parked = parked | LIVING(lane)
            :: else
            fi;
            if
            :: lost -> lost--                      /* the answer does not come: it is written again */
            :: key -> passed = passed | lane; lane = 0; knows = WAITING
            :: key == IN_LINE && !from_pg ->
                /* An operator ended it: what died meanwhile is passed over, the rest is in line. */
                learn_dead()
            :: key == IN_LINE && from_pg
            fi
        fi
       }
#endif
    :: atomic {
        /* A key that is due is begun: nothing of it is to be settled or under way. */
        open && knows == WAITING && !from_pg && !hand && !unsettled && UNDECIDED ->
        if
        :: !MAY_WRITE -> goto drop
        :: else -> put_lane(); go_on()
        fi
       }
    :: atomic {
        /* A parked message fails: the key waits again. */
        from_pg && !from_pg_done && fails ->
        fails--;
        if
        :: !MAY_WRITE -> goto drop
        :: else -> key = (key -> WAITING : IN_LINE); from_pg = 0
        fi
       }
    :: atomic {
        from_pg && !from_pg_done ->
        if
        :: fence_epoch > my_epoch -> goto drop
        :: else ->
            fence_epoch = my_epoch;
            if
            :: applied & SEQ(from_pg - 1)
            :: else -> assert(IN_ORDER(from_pg - 1)); applied = applied | SEQ(from_pg - 1)
            fi;
            from_pg_done = true
        fi
       }
    :: atomic {
        /* parked_messages_end and what is next, in one transaction. */
        from_pg_done ->
        if
        :: !MAY_WRITE -> goto drop
        :: else ->
            put_lane();
            parked = parked & ~SEQ(from_pg - 1);
            handled = handled | SEQ(from_pg - 1);
            from_pg = 0; from_pg_done = false;
            go_on()
        fi
       }
#ifdef UNPARK_BLIND
    :: atomic {
        decided ->
        if
        :: !MAY_WRITE -> goto drop
        :: else -> key = IN_LINE; knows = IN_LINE; decided = false
        fi
       }
#endif
    :: atomic {
        /* A heartbeat: it is ours again, under another epoch. */
        my_epoch && my_epoch != epoch && owner == me -> goto drop
       }
    od;
drop:
    /* Refused somewhere: the holding goes, with all it has in memory. */
    atomic {
        my_epoch = 0; open = false; before = 0; read = 0; lane = 0; hand = 0; from_pg = 0; from_pg_done = false;
        passed = 0; knows = IN_LINE; unsettled = 0; known_dead = 0; handled = 0
#ifdef SETTLE_FIRST
        ; batch = 0
#endif
#ifdef UNPARK_BLIND
        ; decided = false
#endif
    };
    goto end
}

/* Postgres on its own: the partition goes to the other member, or to the same one, which joined again. */
proctype Rebalance()
{
end:
    do
    :: atomic { thefts > 0 -> thefts--; if :: true -> owner = 3 - owner :: true fi; epoch++ }
    od
}

#if DISCARDS > 0
/* failures: an operator lets die what is parked of the key, all of it or what is first. */
proctype Operator()
{
end:
    do
    :: atomic { discards > 0 && key -> discards--; dead = dead | parked; parked = 0; key = IN_LINE }
    :: atomic {
        discards > 0 && key && parked ->
        discards--;
        i_ = FIRST(parked);
        dead = dead | SEQ(i_); parked = parked & ~SEQ(i_);
        key = (parked -> key : IN_LINE);
        i_ = 0
       }
    od
}
#endif

#if FALLS > 0
/* The node restarts: any acks and any lock of before. What was read of it is sent again at the same offsets. */
proctype Nature()
{
end:
    do
    :: atomic {
        falls > 0 ->
        falls--; run_id++;
        do
        :: i_ < N -> if :: settled = settled & ~SEQ(i_) :: true fi; i_++
        :: else -> break
        od;
        i_ = 0;
        do :: lock_epoch > 0 -> lock_epoch-- :: break od
       }
    od
}

/* topics/nodes.py, rearm_node. handover.pml has its steps. */
proctype Arming()
{
end:
    do
    :: atomic { !ARMED -> epoch++; lock_epoch = epoch - 1; armed = run_id }
    od
}
#endif

/* When nothing can move any more, all is done. */
proctype Judge()
{
end:
    atomic {
        timeout ->
        assert(ARMED && (applied | dead) == ALL && settled == ALL);
        assert(key == IN_LINE && !parked)
    }
}

init
{
    atomic {
        run Member(1);
        run Member(2);
        run Rebalance();
#if DISCARDS > 0
        run Operator();
#endif
#if FALLS > 0
        run Nature();
        run Arming();
#endif
        run Judge()
    }
}
