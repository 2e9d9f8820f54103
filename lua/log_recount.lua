#!lua flags=allow-oom
--[[
log_recount: count records that the partition holds and does not tell of: a call ended in its middle, or its meta or its
marks were removed.

Idempotent, and lowers nothing: marks, `next` and `first` go up to what the records say. A command record at the end closes
a partition that is open or waits for its marks, by the seal that it names.

KEYS
  1 log_key     stream  the partition's records
  2 meta_key    hash    state, next and first offset, seal
  3 marks_key   hash    <source>:<lp> -> highest seq

ARGV
  1 from        int     the first offset to look at; 0: behind next
  2 limit       int     look at no more than so many records, 1 to 1000
  3 ...         per mark that it has to have besides: field, seq; 1000 of them at most

RETURNS
  {"counted", next, behind}   behind: the offset behind the last record that was looked at; equal to `from` for none
  {"deleted"}                 only its tombstone is left; nothing was changed
  {"absent"}                  no such partition on this node
]]
local log_key = KEYS[1]
local meta_key = KEYS[2]
local marks_key = KEYS[3]
local from = tonumber(ARGV[1])
local limit = tonumber(ARGV[2])

-- include recount_tail

if limit < 1 or limit > 1000 then return redis.error_reply('ERR log_recount: 1 to 1000 records') end
local meta = redis.call('HMGET', meta_key, 'state', 'next')
local state = meta[1]
if not state then return {'absent'} end
if state == 'deleted' then return {'deleted'} end
for i = 3, #ARGV, 2 do
  if tonumber(redis.call('HGET', marks_key, ARGV[i]) or '-1') < tonumber(ARGV[i + 1]) then
    redis.call('HSET', marks_key, ARGV[i], ARGV[i + 1])
  end
end
if from == 0 then from = tonumber(meta[2]) end
local head = redis.call('XRANGE', log_key, '-', '+', 'COUNT', 1)[1]
if head and string.sub(head[1], -2) == '-0' and from <= tonumber(string.match(head[1], '^%d+')) then
  redis.call('HSET', meta_key, 'first', string.match(head[1], '^%d+'))
end
local behind, command = recount_tail(log_key, meta_key, marks_key, from, limit)
if command and command[2][2] == 'command' and state ~= 'sealed' then
  redis.call('HSET', meta_key, 'state', 'sealed', 'sealed_for', command[2][4], 'seal', command[2][6])
end
return {'counted', tonumber(redis.call('HGET', meta_key, 'next')), behind}
