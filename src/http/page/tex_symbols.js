// Names of TeX and what they stand for in MathML.

/** Words between spaces and line breaks. Other white space belongs to a word. */
const wordsOf = text => text.trim().split(/[ \n]+/);

function pairs(text) {
  const all = wordsOf(text);
  return Object.fromEntries(all.flatMap((word, index) => index % 2 ? [] : [[word, all[index + 1]]]));
}

const IDENTIFIERS = pairs(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ
  nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ
  Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ Re ℜ
  Im ℑ aleph ℵ emptyset ∅ varnothing ∅ imath ı jmath ȷ top ⊤ bot ⊥ degree ° ldots … dots … dotsc … cdots ⋯ dotsb ⋯
  vdots ⋮ ddots ⋱ % % $ $ & & # # _ _ checkmark ✓ square □ Box □ blacksquare ■ triangle △`);
const OPERATORS = pairs(`
  times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ le ≤ leq ≤ leqslant ⩽
  ge ≥ geq ≥ geqslant ⩾ lt < gt > ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ in ∈ notin ∉
  ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ wedge ∧ land ∧ vee ∨ lor ∨ neg ¬ lnot ¬ forall ∀
  exists ∃ nexists ∄ to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔
  implies ⟹ impliedby ⟸ iff ⟺ mapsto ↦ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ hookrightarrow ↪ uparrow ↑
  downarrow ↓ rightleftharpoons ⇌ mid ∣ nmid ∤ parallel ∥ perp ⊥ vdash ⊢ models ⊨ therefore ∴ because ∵ colon :
  prime ′ angle ∠ backslash \\`);
const FENCES = pairs(`
  { { } } lbrace { rbrace } lbrack [ rbrack ] langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ vert | lvert |
  rvert | Vert ‖ lVert ‖ rVert ‖ | ‖`);
const LARGE = pairs("sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀");
const INTEGRALS = pairs("int ∫ iint ∬ iiint ∭ oint ∮");
const FUNCTIONS = new Set(wordsOf(`
  sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg gcd arg hom`));
const LIMITS = pairs(`
  lim lim limsup lim\u2009sup liminf lim\u2009inf max max min min sup sup inf inf argmax arg\u2009max
  argmin arg\u2009min Pr Pr`);
const ACCENTS = pairs(`
  hat ^ widehat ^ check ˇ bar ¯ vec → overrightarrow → dot ˙ ddot ¨ tilde ~ widetilde ~ overbrace ⏞`);
const ACCENTS_BELOW = pairs("underbrace ⏟");
const SPACES = {",": ".17em", ":": ".22em", ";": ".28em", "!": "-.17em", " ": ".33em", enspace: ".5em", quad: "1em", qquad: "2em"};
const IGNORED = new Set(wordsOf(`
  displaystyle textstyle scriptstyle limits nolimits nonumber notag bigl bigr Bigl Bigr biggl biggr Biggl Biggr big
  Big bigg Bigg left. right. middle`));
/** First letter of an alphabet in Unicode, and the letters that have another place. */
const ALPHABETS = {
  mathbf: [0x1d400, ""], boldsymbol: [0x1d400, ""], bm: [0x1d400, ""], mathsf: [0x1d5a0, ""], mathtt: [0x1d670, ""],
  mathbb: [0x1d538, "CℂHℍNℕPℙQℚRℝZℤ"], mathfrak: [0x1d504, "CℭHℌIℑRℜZℨ"],
  mathcal: [0x1d49c, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"], mathscr: [0x1d49c, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"],
};
const ENVIRONMENTS = {
  matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"], array: ["", ""],
  cases: ["{", "", "left"], rcases: ["", "}", "left"],
  aligned: ["", "", "right left"], align: ["", "", "right left"], split: ["", "", "right left"],
  gathered: ["", ""], gather: ["", ""], equation: ["", ""],
};
