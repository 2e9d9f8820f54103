-- Add a range behind a line of ranges, first and last offset in turn: to its last one where it goes on there.
local function range_add(line, first, last)
  local n = #line
  if line[n] == first - 1 then line[n] = last else line[n + 1], line[n + 2] = first, last end
end
