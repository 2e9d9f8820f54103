#!lua flags=allow-oom
--[[
lock_fence: put a higher epoch in force without an owner, so that no call of an earlier owner passes.

An epoch beyond all that Postgres ever gives out is somebody's who meant harm: it counts as none, or nobody could own the
partition again.

KEYS
  1 meta_key    hash    state of the partition; of one that is retired nothing but its tombstone may be left
  2 lock_key    hash    owner, epoch, last refresh, committed, base of the ack bitmap

ARGV
  1 epoch       int     the epoch that Postgres gave out for the next owner

RETURNS
  {"fenced_off"}      every lower epoch is refused from now on
  {"unchanged", epoch}  as high or higher already; nothing was changed
  {"deleted"}         the partition is retired: it serves nobody; nothing was changed
]]
local meta_key = KEYS[1]
local lock_key = KEYS[2]
local epoch = tonumber(ARGV[1])

-- 2^52: epochs grow by one at a time, and by 10^9 where a Postgres was replaced.
local POSSIBLE = 4503599627370496

if redis.call('HGET', meta_key, 'state') == 'deleted' then return {'deleted'} end
local held = tonumber(redis.call('HGET', lock_key, 'epoch') or '0')
if held >= epoch and held <= POSSIBLE then return {'unchanged', held} end
-- One below, so that the owner to whom Postgres gives this very epoch can take the lock.
redis.call('HSET', lock_key, 'owner', '', 'epoch', string.format('%d', epoch - 1))
return {'fenced_off'}
