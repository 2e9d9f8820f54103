#!lua flags=allow-oom
--[[
lock_take: take the pull lock of one partition for a group, or refresh our own.

A higher epoch takes the lock at once, whatever its age; a lower one never. The time of refresh is for people
only and is written at most once a second, so that a busy reader writes nothing.

An owner that did not release the lock died, as far as is known. Where that happens again before the group has come
past what the one before may have had in hand, one of these messages may have killed both: the next owner is to start
them with care.

KEYS
  1 meta_key      hash    state and next offset of the partition
  2 lock_key      hash    owner, epoch, last refresh, committed, base of the ack bitmap, seek; deaths: how many owners
                          in a row died, and suspect: the offset that the group was to come past in between
  3 acks_key      string  ack bitmap: bit i is offset base + i
  4 attempts_key  hash    offset -> failed attempts and when (see attempt_count)

ARGV
  1 member        string  who asks
  2 epoch         int     fencing epoch of its assignment
  3 start         int     offset at which the group starts here, used where nothing is committed yet
  4 afresh        int     1: answer "taken" also where it is ours already (the answer to the taking was lost)
  5 seek          int     how often the group was sent elsewhere: what was committed before the last time is void

RETURNS
  {"kept", committed}                                 ours already
  {"taken", committed, next, base, bits, {offset, failures, ...}, suspect}   ours now; suspect: start what lies below
                                                      it with care, 0 for nothing
  {"fenced", epoch}                                   another epoch is in force: stop
  {"absent"}                                          no such partition on this node
]]
local meta_key = KEYS[1]
local lock_key = KEYS[2]
local acks_key = KEYS[3]
local attempts_key = KEYS[4]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])
local start = tonumber(ARGV[3])
local afresh = ARGV[4] == '1'
local seek = tonumber(ARGV[5])

-- More than a member has in hand of a partition.
local IN_HAND = 20000

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'refreshed_at', 'committed', 'base', 'seek', 'top', 'deaths',
  'suspect')
local held = tonumber(lock[2] or '0')
local now = tonumber(redis.call('TIME')[1])

if held == epoch and lock[1] == member then
  if math.abs(now - tonumber(lock[3] or '0')) >= 1 then
    redis.call('HSET', lock_key, 'refreshed_at', string.format('%d', now))
  end
  if not afresh then return {'kept', tonumber(lock[4])} end
elseif held >= epoch then
  return {'fenced', held}
end

local committed = tonumber(lock[4] or '0')
local base = tonumber(lock[5] or '0')
if tonumber(lock[6] or '0') < seek then
  redis.call('DEL', acks_key, attempts_key)
  redis.call('HSET', lock_key, 'seek', string.format('%d', seek), 'top', '0')
  committed, lock[7] = 0, '0'
end
if committed == 0 then
  -- A partition that fell back below the start begins anew: what comes now is new to the group.
  committed = math.max(math.min(start, tonumber(meta[2])), tonumber(meta[3] or '1'))
  base = committed
end
local deaths, suspect = 0, tonumber(lock[9] or '0')
if held < epoch and (lock[1] or '') ~= '' then
  deaths = committed < suspect and tonumber(lock[8] or '0') + 1 or 1
  suspect = math.min(tonumber(meta[2]), math.max(committed, tonumber(lock[7] or '0')) + IN_HAND)
elseif held == epoch then
  deaths = tonumber(lock[8] or '0')
end
redis.call('HSET', lock_key, 'deaths', string.format('%d', deaths), 'suspect', string.format('%d', suspect))
redis.call('HSET', lock_key, 'owner', member, 'epoch', string.format('%d', epoch),
  'refreshed_at', string.format('%d', now), 'committed', string.format('%d', committed),
  'base', string.format('%d', base))
return {'taken', committed, tonumber(meta[2]), base, redis.call('GET', acks_key) or '', redis.call('HGETALL', attempts_key),
  deaths >= 2 and suspect or 0}
