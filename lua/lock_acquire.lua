#!lua flags=allow-oom
--[[
lock_acquire: take the pull lock of one partition for a group, or refresh our own.

A higher epoch takes the lock at once, whatever its age; a lower one never. The time of refresh is for people
only and is written at most once a second, so that a busy reader writes nothing.

An owner that did not release the lock died, as far as is known. Where that happens again before the group has come
past what the one before may have had in hand, one of these messages may have killed both: the next owner is to start
them with care.

A lock and a bitmap that are not of each other say nothing: without what the lock tells, the group starts anew, and
without its bitmap, at committed. What was settled above that comes again then, in order.

KEYS
  1 meta_key      hash    state and next offset of the partition
  2 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap, seek; crash_count: how many owners
                          in a row died, and suspect: the offset that the group was to come past in between
  3 acks_key      string  ack bitmap: bit i is offset base + i
  4 attempts_key  hash    offset -> failed attempts and when (see attempt_count)
  5 log_key       stream  the partition's records

ARGV
  1 member        string  who asks
  2 epoch         int     fencing epoch of its assignment
  3 start         int     offset at which the group starts here, used where nothing is committed yet
  4 afresh        int     1: answer "acquired" also where it is ours already (the answer to the taking was lost)
  5 seek          int     how often the group was sent elsewhere: what was committed before the last time is void

RETURNS
  {"unchanged", committed}                            ours already
  {"acquired", committed, next, base, bits, {offset, failures, ...}, suspect}   ours now; suspect: start what lies below
                                                      it with care, 0 for nothing
  {"fenced", epoch}                                   another epoch is in force: stop
  {"absent"}                                          no such partition on this node, or its records are gone
]]
local meta_key = KEYS[1]
local lock_key = KEYS[2]
local acks_key = KEYS[3]
local attempts_key = KEYS[4]
local log_key = KEYS[5]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])
local start = tonumber(ARGV[3])
local afresh = ARGV[4] == '1'
local seek = tonumber(ARGV[5])

-- More than a member has in hand of a partition.
local IN_HAND = 20000

-- include bitmap_lost

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'refreshed_at', 'committed', 'base', 'seek', 'top', 'crash_count',
  'suspect')
local held = tonumber(lock[2] or '0')
local now = tonumber(redis.call('TIME')[1])

if held == epoch and lock[1] == member then
  if math.abs(now - tonumber(lock[3] or '0')) >= 1 then
    redis.call('HSET', lock_key, 'refreshed_at', string.format('%d', now))
  end
  if not afresh then return {'unchanged', tonumber(lock[4])} end
elseif held >= epoch then
  return {'fenced', held}
end

if meta[2] ~= '1' and redis.call('EXISTS', log_key) == 0 then return {'absent'} end

local committed, base, top = tonumber(lock[4] or '0'), tonumber(lock[5] or '0'), tonumber(lock[7] or '0')
local bits = ''
if committed == 0 or tonumber(lock[6] or '0') < seek then
  -- Whatever is there is of a lock that is gone, or of before the seek.
  redis.call('DEL', acks_key, attempts_key)
  -- A partition that fell back below the start begins anew: what comes now is new to the group.
  committed = math.max(math.min(start, tonumber(meta[2])), tonumber(meta[3] or '1'))
  base, top = committed, 0
else
  bits = redis.call('GET', acks_key) or ''
  if top > committed and not bitmap_lost(#bits, committed, base, top) then
    -- Who set the last bits may have ended before it could say how far that is.
    committed = math.max(committed, base + redis.call('BITPOS', acks_key, 0, math.floor((committed - base) / 8)))
  else
    top = 0
  end
  if committed >= top then
    if bits ~= '' then redis.call('DEL', acks_key) end
    base, top, bits = committed, 0, ''
  end
end
local noted, attempts = redis.call('HGETALL', attempts_key), {}
for i = 1, #noted, 2 do
  if tonumber(noted[i]) < committed then
    -- Of a call that ended between settling and forgetting.
    redis.call('HDEL', attempts_key, noted[i])
  else
    attempts[#attempts + 1], attempts[#attempts + 2] = noted[i], noted[i + 1]
  end
end
local crash_count, suspect = 0, tonumber(lock[9] or '0')
if held < epoch and (lock[1] or '') ~= '' then
  crash_count = committed < suspect and tonumber(lock[8] or '0') + 1 or 1
  suspect = math.min(tonumber(meta[2]), math.max(committed, top) + IN_HAND)
elseif held == epoch then
  crash_count = tonumber(lock[8] or '0')
end
redis.call('HSET', lock_key, 'owner', member, 'epoch', string.format('%d', epoch),
  'refreshed_at', string.format('%d', now), 'committed', string.format('%d', committed),
  'base', string.format('%d', base), 'top', string.format('%d', top),
  'seek', string.format('%d', math.max(seek, tonumber(lock[6] or '0'))),
  'crash_count', string.format('%d', crash_count), 'suspect', string.format('%d', suspect))
return {'acquired', committed, tonumber(meta[2]), base, bits, attempts, crash_count >= 2 and suspect or 0}
