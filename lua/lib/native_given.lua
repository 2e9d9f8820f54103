-- Return the last offset that a native group was given, and how many of those are pending; nothing where nobody knows.
local function native_given(log_key, group)
  local groups = redis.pcall('XINFO', 'GROUPS', log_key)
  for _, facts in ipairs(groups.err and {} or groups) do
    local named = {}
    for i = 1, #facts, 2 do named[facts[i]] = facts[i + 1] end
    if named['name'] == group then return tonumber(string.match(named['last-delivered-id'], '^%d+')), named['pending'] end
  end
end
