/*
 * Who owns a partition: leases and assignments in Postgres, the pull lock in Redis, effects through the fence, while
 * owners are slow, stopped or dead and the node falls back. See README.md.
 *
 * An atomic block is one Lua script, one Postgres transaction, or one step inside a process. No clock is in it: a lease
 * runs out whenever it likes, and a member goes on between any two of its steps as if it had heard of nothing, which is
 * more than SIGSTOP and any clock can do.
 *
 * Configuration (-D): N and N_OTHER messages of two keys, each in an LP of its own; THEFTS leases run out, MOVES
 * hand-overs are asked for, DEATHS members end and join again under their ids, FALLS times the node falls back, ABORTS
 * times who arms it dies before its commit. With WORDS a supervisor sees each death, and ends that session at any later
 * time; one member may be gone for good. All other switches remove one guard; check.sh lists them.
 */
#ifndef N
#define N 2
#endif
#ifndef N_OTHER
#define N_OTHER 1
#endif
#ifndef THEFTS
#define THEFTS 2
#endif
#ifndef MOVES
#define MOVES 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef FALLS
#define FALLS 0
#endif
#ifndef ABORTS
#define ABORTS 0
#endif

#define ROOM (N + N_OTHER)
#define LAST_SEQ(lp) ((lp) == 0 -> N : N_OTHER)
/* A record is lp * 8 + seq. */
#define LP(record) ((record) / 8)
#define SEQ(record) ((record) % 8)

/* Redis. */
byte log[ROOM], size, mark[2], settled;
byte lock_owner, lock_epoch;
byte run_id;

/* Postgres. */
byte epochs = 1;                       /* the sequence of epochs */
byte owner = 1, target = 1, epoch = 1; /* the assignment; released by its owner it goes to the target */
bool row_locked;                       /* by who arms the node */
byte armed;
byte fence_epoch[2], applied[2];
#ifdef WORDS
byte sessions = 2, session[3];         /* the sequence of sessions; the one of each member, as Postgres has it */
bool ended[3];                         /* whether that one was ended, by a word of death */

/* A supervisor's: the session of a process that it saw end. */
byte word[3];
bool gone;
#endif

/* What is left of each budget. */
byte thefts = THEFTS, moves = MOVES, deaths = DEATHS, falls = FALLS, aborts = ABORTS;

/* Only looked at by assertions: the highest epoch that acted in an LP; whose handler runs, by LP + 1; who was given up. */
byte acted[2], busy[3];
bool excused[3];

hidden byte i_, v_;

#ifdef WORDS
#define MAY_GIVE(m) (!ended[m])
#else
#define MAY_GIVE(m) true
#endif
#define ARMED (run_id == armed)
#define ALL ((1 << size) - 1)
#define UNSETTLED (settled != ALL)

/* lua/lock_acquire.lua: a higher epoch takes the lock at once, our own is kept, a lower one is refused. */
#ifdef LOWER_ACCEPTED
#define MAY_TAKE(e, m) true
#else
#define MAY_TAKE(e, m) (lock_epoch < (e) || (lock_epoch == (e) && lock_owner == (m)))
#endif

/* lua/offsets_settle.lua and lock_release.lua: the caller's epoch is the one in force. */
#ifdef NO_ACK_EPOCH
#define IN_FORCE(e, m) true
#else
#define IN_FORCE(e, m) (lock_owner == (m) && lock_epoch == (e))
#endif

/* The relay appends from the outbox what continues the chain, in any order of the LPs. */
proctype Relay()
{
end:
    do
    :: atomic { ARMED && mark[0] < N -> mark[0]++; log[size] = mark[0]; size++ }
    :: atomic { ARMED && mark[1] < N_OTHER -> mark[1]++; log[size] = 8 + mark[1]; size++ }
    od
}

/* Postgres on its own: leases that run out, and a rebalance that wants the partition elsewhere. */
proctype Rebalance()
{
end:
    do
    :: atomic {
        thefts > 0 && !row_locked ->
        thefts--;
        excused[owner] = true; busy[owner] = 0;
        /* To the other one, or to itself when it joins again. */
        if :: MAY_GIVE(3 - owner) -> owner = 3 - owner :: true fi;
        target = owner; epochs++; epoch = epochs
       }
    :: atomic { moves > 0 && !row_locked && target == owner && MAY_GIVE(3 - owner) -> moves--; target = 3 - owner }
    od
}

#ifdef WORDS
/* sql: member_dead, under the session; then the rebalance, in one transaction. */
inline say_dead(m)
{
    atomic {
        word[m] > 0 && !row_locked ->
        if
#ifndef WORD_NO_SESSION
        :: word[m] != session[m]
#endif
        :: else ->
            ended[m] = true;
            if
            :: owner == m ->
                /* Where no other one lives it is free: nobody acts under that epoch. */
                if :: MAY_GIVE(3 - m) -> owner = 3 - m :: else fi;
                target = owner; epochs++; epoch = epochs
            :: owner != m && target == m -> target = owner
            :: else
            fi
        fi;
        word[m] = 0
    }
}

proctype Supervisor()
{
end:
    do
    :: say_dead(1)
    :: say_dead(2)
#ifdef WORD_GUESS
    /* It takes one that is only slow for dead. */
    :: atomic { deaths > 0 -> deaths--; if :: word[1] = session[1] :: word[2] = session[2] fi }
#endif
    od
}
#endif

inline die()
{
    deaths--;
    busy[me] = 0;
#ifdef WORDS
    word[me] = session[me];
    if :: true :: !gone -> gone = true; goto over fi
#endif
}

inline give_on()
{
    /* sql: assignments_pass to the target; without one assignments_release and the rebalance. One transaction. */
    atomic {
        !row_locked ->
        if
        :: owner == me && epoch == my_epoch && target != me -> owner = target; epochs++; epoch = epochs
        :: else
        fi
    }
}

inline release_lock()
{
    atomic { if :: ARMED && IN_FORCE(my_epoch, me) -> lock_owner = 0 :: else fi }
}

/* The fence in the effect's own transaction: application schema, fence_v1. */
inline effect(record)
{
    v_ = LP(record);
#if !defined(NO_FENCE) && !defined(FENCE_NO_EPOCH) && !defined(CLOCK_ONLY)
    if
    :: fence_epoch[v_] > my_epoch -> v_ = 0; busy[me] = 0; goto again
    :: else -> fence_epoch[v_] = my_epoch
    fi;
#endif
#if defined(NO_FENCE) || defined(CLOCK_ONLY)
    if
    :: true ->
#else
    if
#ifndef FENCE_NO_SEQ
    :: SEQ(record) <= applied[v_]
#endif
    :: else ->
#endif
        /* In order and once: nothing is left out, nothing comes again. */
        assert(SEQ(record) == applied[v_] + 1);
        /* Not by an owner after a later one acted. */
        assert(my_epoch >= acted[v_]);
        applied[v_] = SEQ(record);
        acted[v_] = my_epoch
    fi;
    v_ = 0;
    busy[me] = 0
}

inline settle(which)
{
    if
    :: done & (1 << which) && at[which] < size ->
        /* What is settled was applied: committed never passes anything else. */
        assert(applied[LP(log[at[which]])] >= SEQ(log[at[which]]));
        settled = settled | (1 << at[which])
    :: else
    fi
}

proctype Member(byte me)
{
    byte my_epoch, record[2], at[2], count, done, which;

    /* A heartbeat. Only what there is something to do with is heard of, so that who is stuck is found waiting here. */
end:
    atomic {
        owner == me && ((ARMED && UNSETTLED && MAY_TAKE(epoch, me)) || target != me) ->
        my_epoch = epoch; excused[me] = false
    };
    if
    :: atomic { target != me && owner == me -> goto release }
    :: atomic {
        ARMED && MAY_TAKE(my_epoch, me) ->
        lock_owner = me; lock_epoch = my_epoch;
#ifdef READ_APART
        /* Of a partition that was idle, the read and the check behind it are calls of their own. */
        skip
       };
       atomic {
#endif
        /* Lock and read are one write. Two records at most are in hand. */
        i_ = 0;
        do
        :: i_ < size && count < 2 ->
            if
            :: !(settled & (1 << i_)) -> record[count] = log[i_]; at[count] = i_; count++
            :: else
            fi;
            i_++
        :: else -> break
        od;
        i_ = 0
       }
#ifdef READ_APART
       atomic {
        if
#ifndef NO_LOCK_CHECK
        :: !(ARMED && lock_owner == me && lock_epoch == my_epoch) -> goto again
#endif
        :: else
        fi
       }
#endif
    :: atomic { !(ARMED && MAY_TAKE(my_epoch, me)) -> goto again }
    fi;
#ifndef NO_FENCE_RAISE
    /* fence_raise_v1: best effort. */
    atomic {
        if
        :: true
        :: true ->
            i_ = 0;
            do
            :: i_ < 2 ->
                if :: fence_epoch[i_] < my_epoch -> fence_epoch[i_] = my_epoch; acted[i_] = my_epoch :: else fi;
                i_++
            :: else -> break
            od;
            i_ = 0
        fi
    };
#endif
next:
    /* One key in order, two keys side by side; a hand-over that was heard of starts nothing more. */
    if
    :: atomic {
        !(done & 1) && count > 0 -> which = 0
       }
    :: atomic {
        !(done & 2) && count == 2 && (done & 1 || LP(record[0]) != LP(record[1])) -> which = 1
       }
    :: atomic { done == (1 << count) - 1 -> goto flush }
    :: atomic { owner == me && epoch == my_epoch && target != me -> goto flush }
    /* A reader refreshes the lock before it reads on; by that alone it never gets a lock that it had lost. */
    :: atomic {
        ARMED && !(lock_owner == me && lock_epoch == my_epoch) && MAY_TAKE(my_epoch, me) ->
        lock_owner = me; lock_epoch = my_epoch;
        goto next
       }
    fi;
    /* The handler begins. */
    atomic {
#ifdef CLOCK_ONLY
        /* A clock that is always right. */
        if :: owner != me -> goto again :: else fi;
#endif
        if
        :: !excused[me] ->
            assert(busy[3 - me] != LP(record[which]) + 1);
            busy[me] = LP(record[which]) + 1
        :: else
        fi
    };
#ifdef RELEASE_EARLY
    if
    :: atomic { target != me && owner == me -> skip }; release_lock(); give_on()
    :: true
    fi;
#endif
#if DEATHS > 0
    if
    :: atomic { deaths > 0 -> die(); goto join }
    :: true
    fi;
#endif
    atomic { effect(record[which]); done = done | (1 << which); which = 0 };
    if
    :: goto next
    :: true
    fi;
flush:
#if DEATHS > 0
    if
    :: atomic { deaths > 0 -> die(); goto join }
    :: true
    fi;
#endif
    atomic {
        if
        :: ARMED && IN_FORCE(my_epoch, me) -> settle(0); settle(1)
        :: else -> goto again
        fi
    };
    if
    :: atomic { done != (1 << count) - 1 && !(owner == me && epoch == my_epoch && target != me) -> goto next }
    :: atomic { owner == me && epoch == my_epoch && target != me -> goto release }
    :: atomic { done == (1 << count) - 1 -> goto again }
    fi;
release:
    release_lock();
    give_on();
    goto again;
#if DEATHS > 0
join:
    /* A new process under the old id: sql: assignment_renew. */
    atomic {
        !row_locked ->
#ifdef WORDS
        sessions++; session[me] = sessions; ended[me] = false;
#endif
        if
        :: owner == me -> epochs++; epoch = epochs
#ifdef WORDS
        :: owner != me && ended[owner] -> owner = me; target = me; epochs++; epoch = epochs
#endif
        :: else
        fi
    };
#endif
again:
    atomic {
        my_epoch = 0; record[0] = 0; record[1] = 0; at[0] = 0; at[1] = 0; count = 0; done = 0; which = 0
    };
    goto end;
#ifdef WORDS
over:
    skip
#endif
}

#if FALLS > 0
/* The node restarts with a prefix of its history: of the stream as short as it likes, of acks any, of the lock any. */
proctype Nature()
{
end:
    do
    :: atomic {
        falls > 0 ->
        falls--; run_id++;
        do
        :: size > 0 ->
            size--;
            v_ = log[size];
            log[size] = 0;
            mark[LP(v_)] = SEQ(v_) - 1
        :: break
        od;
        i_ = 0;
        do
        :: i_ < ROOM ->
            if :: i_ < size :: settled = settled & (255 - (1 << i_)) fi;
            i_++
        :: else -> break
        od;
        do :: lock_epoch > 0 -> lock_epoch-- :: break od;
        if :: true :: lock_owner = 0 fi;
#ifdef TOKEN_REDIS
        epochs = lock_epoch;
#endif
        i_ = 0; v_ = 0
       }
    od
}

/* topics/nodes.py, rearm_node: one transaction that holds the node's row and those of its assignments. */
proctype Arming()
{
    byte my_run, raised;

end:
    atomic { !ARMED && !row_locked -> row_locked = true; my_run = run_id };
#ifndef NO_RAISE
    atomic { epochs++; raised = epochs };
#ifndef RAISE_POSTGRES_ONLY
    /* lua/lock_fence.lua */
    atomic {
        if
        :: run_id != my_run -> goto abort
        :: run_id == my_run && lock_epoch < raised -> lock_owner = 0; lock_epoch = raised - 1
        :: else
        fi
    };
#endif
#else
    raised = epoch;
#endif
    if
    :: atomic { aborts > 0 -> aborts--; goto abort }
    :: atomic { epoch = raised; armed = my_run; row_locked = false; goto again }
    fi;
abort:
    row_locked = false;
again:
    atomic { my_run = 0; raised = 0 };
    goto end
}
#endif

/* When nothing can move any more, all is done. */
proctype Judge()
{
end:
    atomic {
        timeout ->
        assert(ARMED && applied[0] == N && applied[1] == N_OTHER);
        assert(size == ROOM && settled == ALL && owner == target)
    }
}

init
{
    atomic {
        run Relay();
        run Rebalance();
#ifdef WORDS
        session[1] = 1; session[2] = 2;
        run Supervisor();
#endif
        run Member(1);
        run Member(2);
#if FALLS > 0
        run Nature();
        run Arming();
#endif
        run Judge()
    }
}
