"""`fairlead doctor`: gather facts about Services, and name the root cause of what is wrong.

`gather` reads facts (effects), `rules` turn facts into findings (pure), `pages` describe each
finding, and `report` prints the findings and the sources of facts that could not be read. A new
source of facts is a field of `facts.Facts` and a function in `gather`; a new rule is a function in
a module of `rules` and a page."""
