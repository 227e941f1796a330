-- End a pause; the weights in force stay. A: owner, or '' for whoever's it is -> 1, or 0 when there was none (of this owner)
unlock()
local owner = pauser()
if not owner or (A[1] ~= '' and owner ~= A[1]) then return 0 end
go_on()
return 1
