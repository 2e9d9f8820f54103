#!lua
--[[
log_append_once: append messages that carry an id, each only where its id is new here; one message per LP.

The chain comes first, as in log_append: a message is taken where its seq is mark + 1. Where its id is known then, it is
a repetition by somebody else: nothing is stored, its seq is not used up, and the answer names the first one's place. So
nobody may have sent anything behind it before this answer. Ids are dropped when they are older than the window, or too
many, two for each that is new; all of them once nothing with an id came for a window.

Ids come first, then records, marks and `next`. An id whose message is not here, since its call ended in the middle, is
nobody's: the mark of its source and LP is below its seq. Records behind `next` are counted first, as in log_append.

KEYS
  1 log_key       stream  the partition's records, entry id <offset>-0
  2 meta_key      hash    state, range of LPs, next offset
  3 marks_key     hash    <source>:<lp> -> highest seq that is in the partition
  4 ids_key       hash    id -> <lp>:<source>:<seq>:<offset>[:<partition, where it is another one>]
  5 ages_key      zset    id -> ms when it came

ARGV
  1 source        int     who numbered the messages
  2 backlog       int     refuse when the stream holds this many records; 0: no limit
  3 window_ms     int     how long an id is known at the least, while there are no more than id_limit
  4 id_limit      int     how many ids a partition remembers
  5 run_count     int     1 to 500
  6 ...           per message: lp, seq, id, facts, key, body

RETURNS
  {"each", word, fact, ...}           per message: "ok" (appended; its offset), "same" (nothing; the first one's place),
                                      "dup" (its seq is there already; its place, empty where its id is forgotten),
                                      "gap" (nothing; the mark), "unowned" (nothing; LP not served here)
  {"sealed", change}                  nothing appended, as all below: closed for this change
  {"importing", change}               not open yet
  {"deleted", change}                 only its tombstone is left
  {"absent"}                          no such partition on this node, or it lost its records or marks
  {"full", length}                    at its backlog limit
  {"too_large", count}                more than 500 messages
]]
local log_key = KEYS[1]
local meta_key = KEYS[2]
local marks_key = KEYS[3]
local ids_key = KEYS[4]
local ages_key = KEYS[5]
local source = ARGV[1]
local backlog = tonumber(ARGV[2])
local window_ms = tonumber(ARGV[3])
local id_limit = tonumber(ARGV[4])
local run_count = tonumber(ARGV[5])

local call, format, argv = redis.call, string.format, ARGV

-- include recount_tail

local meta = call('HMGET', meta_key, 'state', 'lp_from', 'lp_to', 'next')
local state = meta[1]
if not state then return {'absent'} end
if state ~= 'open' then return {state, call('HGET', meta_key, state == 'sealed' and 'sealed_for' or 'change') or ''} end
if backlog > 0 then
  local length = call('XLEN', log_key)
  if length >= backlog then return {'full', length} end
end
if run_count > 500 then return {'too_large', run_count} end
if #argv ~= 5 + 6 * run_count then
  return redis.error_reply('ERR log_append_once: the count does not match the messages given')
end

local lp_from, lp_to = tonumber(meta[2]), tonumber(meta[3])
local offset = recount_tail(log_key, meta_key, marks_key, tonumber(meta[4]), 500)
if offset > 1 and call('EXISTS', log_key) == 0 then return {'absent'} end
local fields, ids, known = {}, {}, {}
for i = 1, run_count do
  local at = 6 * i
  fields[i], ids[i] = source .. ':' .. argv[at], argv[at + 2]
  if known[fields[i]] then return redis.error_reply('ERR log_append_once: two messages of one LP in a call') end
  known[fields[i]] = true
end
local marks = call('HMGET', marks_key, unpack(fields))
if offset > 1 and call('EXISTS', marks_key) == 0 and call('XLEN', log_key) > 0 then return {'absent'} end
local places = call('HMGET', ids_key, unpack(ids))
local now = call('TIME')
local now_ms = format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))

local function is_here(place)
  local lp, of, seq, _, elsewhere = string.match(place, '^(%d+):(%d+):(%d+):(%d+)(:?)')
  return elsewhere == ':' or tonumber(call('HGET', marks_key, of .. ':' .. lp) or '0') >= tonumber(seq)
end

-- The ids come first: one that is noted and whose message is not here is nobody's.
local report = {'each'}
local records, stored, raised, noted, ages, taken = {}, 0, {}, {}, {}, {}
for i = 1, run_count do
  local at = 6 * i
  local lp, seq, mark = tonumber(argv[at]), tonumber(argv[at + 1]), tonumber(marks[i] or 0)
  local place = taken[ids[i]] or (places[i] and is_here(places[i]) and places[i])
  local word, fact
  if lp < lp_from or lp >= lp_to then
    word, fact = 'unowned', ''
  elseif seq > mark + 1 then
    word, fact = 'gap', mark
  elseif seq <= mark then
    word, fact = 'dup', place or ''
  elseif place then
    word, fact = 'same', place
  else
    word, fact = 'ok', offset + stored
    taken[ids[i]] = format('%s:%s:%s:%d', argv[at], source, argv[at + 1], fact)
    stored = stored + 1
    records[stored] = {format('%d-0', fact), fields[i] .. ':' .. argv[at + 1] .. ':' .. argv[at + 3], argv[at + 4], argv[at + 5]}
    raised[2 * stored - 1], raised[2 * stored] = fields[i], argv[at + 1]
    noted[2 * stored - 1], noted[2 * stored] = ids[i], taken[ids[i]]
    ages[2 * stored - 1], ages[2 * stored] = now_ms, ids[i]
  end
  report[2 * i], report[2 * i + 1] = word, fact
end
if stored > 0 then
  call('ZADD', ages_key, unpack(ages))
  call('HSET', ids_key, unpack(noted))
  for _, record in ipairs(records) do
    call('XADD', log_key, record[1], 'm', record[2], 'k', record[3], 'b', record[4])
  end
  call('HSET', marks_key, unpack(raised))
  call('HSET', meta_key, 'next', format('%d', offset + stored))
  local before = format('(%.0f', tonumber(now_ms) - window_ms)
  local gone = call('ZRANGEBYSCORE', ages_key, '-inf', before, 'LIMIT', 0, 2 * stored)
  if #gone == 0 then
    local over = math.min(call('ZCARD', ages_key) - id_limit, 2 * stored)
    if over > 0 then gone = call('ZRANGE', ages_key, 0, over - 1) end
  end
  if #gone > 0 then
    call('HDEL', ids_key, unpack(gone))
    call('ZREM', ages_key, unpack(gone))
  end
  call('PEXPIRE', ids_key, window_ms)
  call('PEXPIRE', ages_key, window_ms)
end
return report
