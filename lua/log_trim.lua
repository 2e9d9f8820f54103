#!lua flags=allow-oom
--[[
log_trim: drop records that every group has settled.

`first` is raised before anything goes, as far as records may go, and then said as it is: where the call ends in between,
it is too high, and a group that begins here passes over records that every group settled. Were it too low, such a group
would wait for records that are gone.

KEYS
  1 meta_key     hash    state, next and first offset of the partition
  2 log_key      stream  the partition's records
  3 ...          per group that counts: its lock hash

ARGV
  1 entry_limit  int     look at no more than so many records
  2 floor        int     never drop this offset or a later one
  3 ...          per group: how often it was sent elsewhere, and the offset at which it starts since; that one counts
                 where it has committed nothing since

RETURNS
  {"trimmed", count, first, ...}   count records dropped; first is the lowest offset kept; then per group how many
                              expired messages it settled, ever
  {"absent"}                  no such partition on this node
]]
local meta_key = KEYS[1]
local log_key = KEYS[2]
local entry_limit = tonumber(ARGV[1])
local floor = tonumber(ARGV[2])

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
-- The command of a sealed partition stays: its id is below that of a next record.
if meta[1] == 'sealed' then floor = math.min(floor, tonumber(meta[2]) - 1) end
local expired = {}
for i = 3, #KEYS do
  local lock = redis.call('HMGET', KEYS[i], 'committed', 'seek', 'expired')
  expired[i - 2] = tonumber(lock[3] or '0')
  local seek, start = tonumber(ARGV[2 * i - 3]), tonumber(ARGV[2 * i - 2])
  local begun = lock[1] and tonumber(lock[2] or '0') >= seek
  floor = math.min(floor, begun and tonumber(lock[1]) or start)
end
local function offset_of(entry) return tonumber(string.match(entry[1], '^%d+')) end
local known = meta[3]
local head = redis.call('XRANGE', log_key, '-', '+', 'COUNT', 1)[1]
local bound = math.min(floor, tonumber(meta[2]))
if head and offset_of(head) < bound and tonumber(known or '1') < bound then
  known = string.format('%d', bound)
  redis.call('HSET', meta_key, 'first', known)
end
local count = redis.call('XTRIM', log_key, 'MINID', '~', string.format('%d-0', floor), 'LIMIT', entry_limit)
head = redis.call('XRANGE', log_key, '-', '+', 'COUNT', 1)[1]
-- The command of a partition that never had a record has offset 0.
local first = math.max(1, head and offset_of(head) or tonumber(meta[2]))
-- Also where an earlier call ended before this.
if string.format('%d', first) ~= known then redis.call('HSET', meta_key, 'first', string.format('%d', first)) end
return {'trimmed', count, first, unpack(expired)}
