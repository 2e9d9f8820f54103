#!lua flags=allow-oom
--[[
group_forget: drop what a retired group has at one partition; first all but a lock that refuses its late owners.

The group may have come back meanwhile, under a higher epoch: then nothing is touched. What became of messages stays as
long as no archiver has fetched it. The epoch comes first and the lock goes last: whatever is left by a call that ended
in its middle, late owners are refused, and the next call removes it.

KEYS
  1 meta_key      hash    state of the partition; of one that is retired nothing but its tombstone may be left
  2 lock_key      hash    owner, epoch; committed and all else go
  3 outcomes_key  stream  what became of offsets, until an archiver has fetched it
  4 log_key       stream  the partition's records, on which the native group of a shared one stands
  5 ...           what else the group has here

ARGV
  1 epoch         int     the epoch that Postgres gave out when the group was retired: all below it are refused
  2 for_good      int     1: late owners are not to be feared any more, drop the lock too
  3 archived      int     1: keep the stream while something is in it

RETURNS
  {"unchanged", epoch}   the group came back under this epoch; nothing was changed
  {"lock_only"}     nothing but the lock is left
  {"unfetched"}     nothing but the lock and outcomes that are not fetched
  {"forgotten"}     nothing is left
]]
local meta_key = KEYS[1]
local lock_key = KEYS[2]
local outcomes_key = KEYS[3]
local log_key = KEYS[4]
local epoch = tonumber(ARGV[1])
local for_good = ARGV[2] == '1'
local archived = ARGV[3] == '1'

local held = tonumber(redis.call('HGET', lock_key, 'epoch') or '0')
if held >= epoch then return {'unchanged', held} end
local state = redis.call('HGET', meta_key, 'state')
local unfetched = archived and redis.call('XLEN', outcomes_key) > 0
redis.call('HSET', lock_key, 'owner', '', 'epoch', string.format('%d', epoch - 1))
local native = redis.call('HGET', lock_key, 'shared')
if native and redis.call('EXISTS', log_key) == 1 then redis.call('XGROUP', 'DESTROY', log_key, native) end
if not unfetched then redis.call('UNLINK', outcomes_key) end
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
if not state or state == 'deleted' or (for_good and not unfetched) then
  redis.call('UNLINK', lock_key)
  return {unfetched and 'unfetched' or 'forgotten'}
end
redis.call('HDEL', lock_key, 'refreshed_at', 'committed', 'base', 'top', 'seek', 'outcome_count', 'crash_count', 'suspect', 'shared', 'reclaimed_to',
  'pop', 'wake_count', 'examined', 'withheld_until', 'packed', 'queued',
  'parking', 'unparked')
return {unfetched and 'unfetched' or 'lock_only'}
