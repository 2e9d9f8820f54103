#!lua flags=allow-oom
--[[
shared_reclaim: take messages of a shared group from members that were not heard of for a while, to be given again at once.

Whoever gets one of them starts it with care: it may have ended its member's process. Consumers of members that are long
gone are forgotten. What is with nobody and is not due, since that was removed, is due now; so are deferred messages where
some are missing in their index.

KEYS
  1 log_key       stream  the partition's records, with the native consumer group
  2 lock_key      hash    owner ("shared") and epoch; reclaimed_to: up to which offset what is with nobody was looked at
  3 attempts_key  hash    offset -> failed attempts and when (see shared_nack)
  4 due_key       zset    offset -> ms when it may be given again, inf: deferred
  5 queues_key    zset    deferred messages by class (see shared_defer)

ARGV
  1 group         string  the native consumer group
  2 epoch         int     the epoch in force
  3 visibility_timeout_ms int     ms after which a message is taken from a member that did not say that it still has it
  4 limit         int     1 to 500 messages
  5 member        string  only what this one has; empty: every member

RETURNS
  {"reclaimed", count}   so many messages are due
  {"missing"}            there is no such native group: take the partition afresh
  {"fenced", epoch}      another epoch is in force; nothing was changed
]]
local log_key = KEYS[1]
local lock_key = KEYS[2]
local attempts_key = KEYS[3]
local due_key = KEYS[4]
local queues_key = KEYS[5]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local visibility_timeout_ms = ARGV[3]
local limit = tonumber(ARGV[4])
local member = ARGV[5]

local FORGET_MS = 3600000
local format = string.format
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'shared' or held ~= epoch then return {'fenced', held} end
if limit < 1 or limit > 500 then return redis.error_reply('ERR shared_reclaim: 1 to 500 messages') end
local consumers = redis.pcall('XINFO', 'CONSUMERS', log_key, group)
if consumers.err then return {'missing'} end
local time = redis.call('TIME')
local now = format('%d', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local done = 0
if redis.call('ZCOUNT', due_key, 'inf', 'inf') > redis.call('ZCARD', queues_key) then
  for _, offset in ipairs(redis.call('ZRANGEBYSCORE', due_key, 'inf', 'inf', 'LIMIT', 0, limit)) do
    redis.call('ZADD', due_key, now, offset)
    done = done + 1
  end
end
for _, facts in ipairs(consumers) do
  local named = {}
  for i = 1, #facts, 2 do named[facts[i]] = facts[i + 1] end
  local name = named['name']
  if name == '-' and named['pending'] > redis.call('ZCARD', due_key) then
    -- It is with nobody, and what said when it is due is gone: it is due now.
    local from = redis.call('HGET', lock_key, 'reclaimed_to') or '0'
    local page = redis.call('XPENDING', log_key, group, '(' .. from .. '-0', '+', limit, '-')
    for _, one in ipairs(page) do redis.call('ZADD', due_key, 'NX', now, string.match(one[1], '^%d+')) end
    local reclaimed_to = #page == limit and string.match(page[limit][1], '^%d+') or '0'
    redis.call('HSET', lock_key, 'reclaimed_to', reclaimed_to)
  elseif name ~= '-' and named['pending'] == 0 and named['idle'] > FORGET_MS then
    redis.call('XGROUP', 'DELCONSUMER', log_key, group, name)
  elseif name ~= '-' and (member == '' or name == member) and named['pending'] > 0 and done < limit then
    local late = redis.call('XPENDING', log_key, group, 'IDLE', visibility_timeout_ms, '-', '+', limit - done, name)
    for _, one in ipairs(late) do
      local id = one[1]
      local offset = string.match(id, '^%d+')
      if string.sub(id, -2) ~= '-0' then
        -- A command record that its reader did not settle: nobody else needs it.
        redis.call('XACK', log_key, group, id)
      else
        local count, first, last = string.match(redis.call('HGET', attempts_key, offset) or '', '^(%d+):(%d+):(%d+)')
        redis.call('ZADD', due_key, now, offset)
        redis.call('HSET', attempts_key, offset, format('%s:%s:%s:t', count or '0', first or now, last or now))
        redis.call('XCLAIM', log_key, group, '-', 0, id, 'JUSTID')
        done = done + 1
      end
    end
  end
end
return {'reclaimed', done}
