"""Imported by the server that workers are forked from: they find the parser read in, and its tables filled.

The parser fills its tables as it meets forms of expressions, which costs ten times what parsing costs later.
"""

from tepo_nemo.reward.symbolic import expressions_equal

_FORMS = r"""
\frac{\sqrt{3}}{2} x                    ; -\frac{x}{2} \cdot \sqrt{3}+1
\sin(2x) + e^{-t}                       ; 2 \sin x \cos x + e^{-\frac{t}{2}}
\binom{n}{2}                            ; \frac{n(n-1)}{2}
3\sqrt{13}                              ; -\sqrt[3]{\frac{5}{12}}
(x+1)^2-4 x y                           ; x^{2}+2x+1
\frac{1}{1-x^{2}}                       ; \frac{-1}{(x-1)(x+1)}
\lfloor\frac{n}{2}\rfloor+1             ; \lceil n/2\rceil
\frac{\pi}{6}+\ln 2                     ; \frac{\pi^{2}-9}{9}-8 \ln 2
\frac{n!(n-1)!}{2^{n-1}}                ; 2^{100}-(n+1)!
\cos(\omega t+\pi / 3) e^{-\zeta t}     ; \arctan \frac{a}{b}-\tan \theta
|x-1|                                   ; \log_{2} 3+\log 5
a_{1} x_{0}+C_{2} y                     ; \frac{1}{3} E_{1}-\rho_{0} r^{2}
-2+7i                                   ; i(2-i)/3
x/2-1/4                                 ; \sin^{2} \theta-\sec x
\sqrt{2+\sqrt{3}}                       ; \frac{1+\sqrt{5}}{2 \sqrt{2}}
\sum_{k=0}^{n-1} a_{k} F_{n-k}           ; \prod_{k=1}^{n} \frac{k}{2 k-1}
(x^{2}-y^{2})-(1)                        ; (34x+45y-20z+100)-(0)
(\sin(x))-(\frac{4}{5})                  ; (y_{1})-(-2(x-1)^2+5)
7\sin(\frac{\pi}{5}x)+1                  ; 3\cos(\sqrt{980/7}\cdot t)
f(x)+u(t)                               ; \frac{1}{m}(e^{-a t}-1)
"""

for _line in _FORMS.strip().splitlines():
    expressions_equal(*(side.strip() for side in _line.split(";")))
